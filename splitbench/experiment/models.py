# SPDX-License-Identifier: Apache-2.0
"""The config of an experiment: what a YAML file may say, with defaults, units and the rules between fields.

The JSON Schema in `config/schema.json` is generated from these models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from splitbench.experiment.claims import Claim
from splitbench.experiment.fields import (
    MEMORY_ARGS,
    NAME_PATTERN,
    Address,
    FilePath,
    HubWord,
    Name,
    Percentile,
    Port,
    PositiveInt,
    Section,
)
from splitbench.experiment.layouts import (
    AggregatedLayout,
    EngineDefaults,
    EngineSpec,
    Layout,
    MpsShare,
    PdLayout,
    ReplicasLayout,
)
from splitbench.experiment.workloads import Workload
from splitbench.figures.spec import FigureName, FigureSpec, Limits, Window
from splitbench.serving.synthetic_model import SyntheticModel

# What others name of the config, wherever it stands.
__all__ = [
    "MEMORY_ARGS",
    "NAME_PATTERN",
    "AggregatedLayout",
    "EngineDefaults",
    "EngineSpec",
    "Experiment",
    "FigureSettings",
    "Layout",
    "Matrix",
    "Model",
    "MpsShare",
    "PdLayout",
    "ReplicasLayout",
    "Stack",
    "Telemetry",
    "Thresholds",
    "Workload",
]


class Stack(Section):
    """The pinned serving software: built from a lock by the workflow, or an environment that is there already."""

    name: Name = Field(description="what this stack is called in paths and reports")
    lock: FilePath | None = Field(None, description="lock file from which the serving environment is built")
    python: FilePath | None = Field(None, description="interpreter of a serving environment made elsewhere")
    packages: dict[str, str] = Field(
        default_factory=dict,
        description="versions that must be found there; with `python` this is what results are keyed by",
    )
    expects: FilePath | None = Field(
        None, description="stack file that the machine and this software are checked against before any cell"
    )
    torch_cpu_index: Address = Field(
        "https://download.pytorch.org/whl/cpu",
        description="where torch's CPU build comes from when pip's own sources have none",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.lock is None) == (self.python is None):
            raise ValueError("give exactly one of 'lock' (build it) and 'python' (use it)")
        if self.python is not None and "vllm" not in self.packages:
            raise ValueError("'packages' must state at least vllm's version when 'python' is given")
        return self


class Model(Section):
    """The model that every engine serves."""

    name: Name = Field(description="name under which it is served; requests carry it")
    synthetic: SyntheticModel | None = Field(None, description="make a small random model of this shape")
    path: FilePath | None = Field(None, description="folder with weights and tokenizer")
    hub: HubWord | None = Field(None, description="hub id, fetched or found in the hub cache by vLLM")
    revision: HubWord | None = Field(None, description="commit of the hub repository")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.synthetic, self.path, self.hub)) != 1:
            raise ValueError("give exactly one of 'synthetic', 'path' and 'hub'")
        return self


class Telemetry(Section):
    """What is watched while a cell runs."""

    interval_s: PositiveFloat = Field(1.0, description="between samples of processes, processors and GPUs")
    metrics_interval_s: NonNegativeFloat | None = Field(
        None,
        description="between samples of the engines' gauges, 0: only before and after; default: 5 where engines "
        "run on GPUs, 0 on cores, since asking holds up the tokens of all",
    )


class Node(Section):
    """How this machine is used; nothing in here changes a result, so nothing in here is part of a digest."""

    base_port: Port = Field(17100, description="ports are counted upwards from here")
    idle_limit_s: PositiveFloat = Field(300.0, description="a session that nobody uses ends after this")
    telemetry: Telemetry = Telemetry()
    selftest_streams: tuple[PositiveInt, ...] = Field(
        (1, 4, 16, 64, 256),
        description="requests in flight at which is measured, before the first cell, what the client itself adds to "
        "latencies; empty: it is not",
    )


class Matrix(Section):
    """The axes of the experiment; every combination is a cell."""

    concurrency: Annotated[
        list[PositiveInt], Field(min_length=1, description="requests in flight (closed loop)")
    ]
    order: Literal["random", "listed"] = Field(
        "random",
        description="of the cells: random in blocks, or as the config lists them (when a run may be cut short)",
    )
    restarts: PositiveInt = Field(1, description="bring-ups of each layout")
    repeats: PositiveInt = Field(1, description="runs of each cell within one bring-up")

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.concurrency)) != len(self.concurrency):
            raise ValueError(f"concurrency {self.concurrency} names a value twice; remove one")
        return self


class Slo(Section):
    """What the service must keep; in milliseconds at the given percentile."""

    itl_ms: PositiveFloat | None = Field(None, description="limit on the gap between tokens, in milliseconds")
    ttft_ms: PositiveFloat | None = Field(
        None, description="limit on the time to first token, in milliseconds"
    )
    percentile: Percentile = Field(99.0, description="the percentile that must keep the limits, in percent")


class Price(Section):
    """What an accelerator costs; without a price, cost is given in accelerator hours."""

    per_accelerator_hour: PositiveFloat = Field(description="price of one accelerator for an hour")
    currency: str = Field("USD", description="in which that is, as figures print it")


class Rates(Section):
    """Rates for an estimate before anything was measured; each stated one is used until cells tell better."""

    startup_s: PositiveFloat = Field(300.0, description="one bring-up of a layout")
    prefill_tokens_per_s: PositiveFloat | None = Field(None, description="prompt tokens of one layout")
    itl_ms: PositiveFloat | None = Field(None, description="between two tokens of one answer")


class Thresholds(Section):
    """When a cell counts; the defaults and their reasons are in docs/method.md."""

    input_tokens_off_percent: PositiveFloat = Field(
        0.5, description="tokens: a prompt's length may be off by this much"
    )
    coalesced_warn_percent: PositiveFloat = Field(
        1.0, description="coalescing: warn above this share of merged or near-zero gaps"
    )
    coalesced_invalid_percent: PositiveFloat = Field(
        5.0, description="coalescing: refuse above this share of merged or near-zero gaps"
    )
    coalesced_below_ms: PositiveFloat = Field(
        0.2,
        description="coalescing: a gap below this, or below a tenth of the median if that is less, is near zero",
    )
    prefix_hit_percent: PositiveFloat = Field(
        1.0, description="fresh-prompts: this share of prompt tokens may come from the prefix cache"
    )
    kv_moved_percent: PositiveFloat = Field(
        99.0, description="kv-moved: decoders must have loaded this share of the prompt tokens"
    )
    load_percent: PositiveFloat = Field(
        95.0, description="of the concurrency, or of the offered rate, that must be reached"
    )
    client_cpu_percent: PositiveFloat = Field(
        90.0, description="of a core that the client may use on average"
    )
    client_late_percent: PositiveFloat = Field(
        25.0,
        description="how late the client's event loop may be, as a share of the ITL at the same percentile",
    )
    client_late_ms: PositiveFloat = Field(5.0, description="late ticks below this are never remarked on")
    steal_percent: PositiveFloat = Field(
        5.0, description="of the processors that a hypervisor may take away, where engines run on GPUs"
    )
    taken_warn_percent: PositiveFloat = Field(
        5.0,
        description="of the processors that other processes and a hypervisor may take, where engines run on cores, "
        "before it is remarked on",
    )
    taken_invalid_percent: PositiveFloat = Field(
        25.0, description="the same, beyond which the cell is refused"
    )
    power_capped_percent: PositiveFloat = Field(
        5.0, description="of the samples in which a GPU's power limit may hold its clocks down"
    )
    unanswered_percent: PositiveFloat = Field(
        1.0,
        description="of the requests whose load may be missing in a decoder's log before the cell is invalid",
    )
    same_answers_warn_percent: PositiveFloat = Field(
        10.0, description="by which answers may differ from an engine's own more than it differs from itself"
    )
    same_answers_invalid_percent: PositiveFloat = Field(
        50.0,
        description="the same, beyond which a layout is not measured: rounding differs late, lost KV at once",
    )
    same_answers_shared_tops_percent: PositiveFloat = Field(
        40.0,
        description="of the 20 likeliest first tokens that must be an engine's own where answers differ; rounding "
        "leaves 50 to 90, another first token of the prompt 5 to 30",
    )


class FigureSettings(Section):
    """How one kind of figure is drawn, for every workload; nothing in here causes a cell to run."""

    layouts: list[Name] = Field(default_factory=list, description="which layouts; default: all")
    concurrency: PositiveInt | None = Field(None, description="for figures at one load; default: the highest")
    concurrencies: list[PositiveInt] = Field(
        default_factory=list, description="for figures over loads; default: all"
    )
    window: Window = Field(default_factory=Window, description="the part of the axes that is drawn")
    windows: dict[Name, Window] = Field(default_factory=dict, description="the same for single workloads")
    percentiles: tuple[Percentile, ...] = Field((50.0, 99.0), description="marked on every curve, in percent")
    slo_ms: PositiveFloat | None = Field(None, description="drawn as a line; default: none")
    width: Literal["auto", "column", "page"] = Field(
        "auto", description="3.5 inches, 7 inches, or what it needs"
    )

    def spec(self, figure: FigureName, workload: str, **shared: Any) -> FigureSpec:
        """One figure of one workload; `shared` is what it takes from other sections."""
        return FigureSpec(
            figure=figure,
            workload=workload,
            layouts=tuple(self.layouts),
            concurrency=self.concurrency,
            concurrencies=tuple(self.concurrencies),
            window=self.windows.get(workload, self.window),
            percentiles=self.percentiles,
            slo_ms=self.slo_ms,
            width=self.width,
            **shared,
        )


def _default_figures() -> dict[FigureName, FigureSettings]:
    names: tuple[FigureName, ...] = ("itl_by_concurrency", "itl_of_layouts", "ttft_of_layouts")
    return {name: FigureSettings() for name in names}


class Experiment(Section):
    """One experiment: what is compared, under which load, on which software."""

    experiment: Name = Field(description="its name, and the folder of its results")
    title: str = Field("", description="the report's headline")
    check: Literal["fail", "warn"] = Field(
        "fail", description="when the machine does not fit: stop before the first cell, or go on and say so"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="from which prompts and the order of cells are drawn"
    )
    stack: Stack
    model: Model
    node: Node = Node()
    engine: EngineDefaults = EngineDefaults()
    layouts: Annotated[dict[Name, Layout], Field(min_length=1)] = Field(
        description="the arms that are compared, by name"
    )
    workloads: Annotated[dict[Name, Workload], Field(min_length=1)] = Field(
        description="kinds of requests, by name; each is measured at every load on every layout"
    )
    matrix: Matrix
    slo: Slo = Slo()
    margin_percent: PositiveFloat = Field(
        5.0, description="a difference counts for a verdict only if it is surely larger than this"
    )
    price: Price | None = Field(None, description="of an accelerator, for costs")
    claims: dict[Name, Claim] = Field(
        default_factory=dict, description="expectations that the report judges, by name"
    )
    rates: Rates = Field(default_factory=Rates, description="for estimates before the first cell")
    language: Literal["en", "ja"] = Field("en", description="of the report")
    thresholds: Thresholds = Thresholds()
    on_invalid: Literal["keep", "rerun", "stop"] = Field(
        "keep",
        description="a cell that fails a check is kept and marked, measured again (two more times at most), or ends "
        "the run; also as `--config on_invalid=rerun`",
    )
    figures: dict[FigureName, FigureSettings] = Field(
        default_factory=_default_figures,
        description="which figures are drawn for every workload, and how; default: itl_by_concurrency, "
        "itl_of_layouts, ttft_of_layouts",
    )

    def figure_spec(self, figure: FigureName, workload: str) -> FigureSpec:
        """What a figure shows. Only those that show the SLO, a price or the margin depend on them."""
        shared: dict[str, Any] = {}
        if figure in ("goodput", "cost"):
            shared["limits"] = Limits(itl_ms=self.slo.itl_ms, ttft_ms=self.slo.ttft_ms)
        if figure == "cost" and self.price is not None:
            shared |= {"price_per_hour": self.price.per_accelerator_hour, "currency": self.price.currency}
        if figure == "break_even":
            shared["margin_percent"] = self.margin_percent
        return self.figures[figure].spec(figure, workload, **shared)
