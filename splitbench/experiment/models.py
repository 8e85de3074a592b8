# SPDX-License-Identifier: Apache-2.0
"""The config of an experiment: what a YAML file may say, with defaults, units and the rules between fields.

The JSON Schema in `config/schema.json` is generated from these models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from splitbench.experiment.claims import Claim
from splitbench.figures.spec import FigureName, FigureSpec, Limits, Window
from splitbench.serving.plan import MAX_NODES, Connector, FirstToken, Router
from splitbench.serving.synthetic_model import SyntheticModel

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9+._-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Port = Annotated[int, Field(ge=1024, le=65535)]
NonNegativeInt = Annotated[int, Field(ge=0)]
ArgValue = bool | int | float | str | list[int | float | str] | dict[str, Any] | None

# Flags of `vllm serve` that the plan sets itself; a second opinion in the config would make the plan lie.
OWNED_ARGS = frozenset(
    {
        "api-key",
        "api-server-count",
        "config",  # a file of flags, which would go round all of this
        "data-parallel-address",
        "data-parallel-external-lb",
        "data-parallel-hybrid-lb",
        "data-parallel-rank",
        "data-parallel-rpc-port",
        "data-parallel-size",
        "data-parallel-size-local",
        "data-parallel-start-rank",
        "headless",
        "host",
        "kv-transfer-config",
        "master-addr",
        "master-port",
        "model",
        "nnodes",
        "node-rank",
        "pipeline-parallel-size",
        "port",
        "revision",
        "served-model-name",
        "ssl-certfile",
        "ssl-keyfile",
        "tensor-parallel-size",
        "tokenizer",
        "uds",
    }
)
OWNED_ENV = frozenset(
    {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_MPS_LOG_DIRECTORY",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_VISIBLE_DEVICES",
        "GOMP_CPU_AFFINITY",
        "LMCACHE_CONFIG_FILE",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "VLLM_SERVER_DEV_MODE",
    }
)
# Flags that a field of an engine states too.
MEMORY_ARGS = {"gpu-memory-utilization": "memory_share", "kv-cache-memory-bytes": "kv_cache_bytes"}
SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL)", re.IGNORECASE)
# Flags of `vllm bench serve` that the cell sets itself.
OWNED_CLIENT_ARGS = frozenset(
    {
        "append-result",
        "backend",
        "base-url",
        "burstiness",
        "custom-output-len",
        "dataset-name",
        "dataset-path",
        "disable-shuffle",
        "endpoint",
        "header",
        "host",
        "ignore-eos",
        "max-concurrency",
        "metadata",
        "metric-percentiles",
        "model",
        "num-prompts",
        "num-warmups",
        "percentile-metrics",
        "port",
        "prefix-repetition-num-prefixes",
        "prefix-repetition-output-len",
        "prefix-repetition-prefix-len",
        "prefix-repetition-suffix-len",
        "ramp-up-end-rps",
        "ramp-up-start-rps",
        "ramp-up-strategy",
        "random-input-len",
        "random-output-len",
        "random-prefix-len",
        "random-range-ratio",
        "ready-check-timeout-sec",
        "request-id-prefix",
        "request-rate",
        "result-dir",
        "result-filename",
        "save-detailed",
        "save-result",
        "seed",
        "served-model-name",
        "skip-chat-template",
        "temperature",
        "tokenizer",
    }
)


def _one_or_many(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _flag_names(owned: frozenset[str]) -> AfterValidator:
    def check(args: dict[str, Any]) -> dict[str, Any]:
        for flag in args:
            if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", flag):
                raise ValueError(
                    f"'{flag}' is not a flag name; write it as 'max-num-seqs', without dashes in front"
                )
            # Parsers take a flag's part behind a dot, its negation, and its beginning for it.
            plain = flag.partition(".")[0].removeprefix("no-")
            if any(name == plain or name.startswith(plain) for name in owned):
                raise ValueError(f"'{flag}' is set by the plan; remove it here")
        return args

    return AfterValidator(check)


def _env_names(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"'{name}' is not a name for an environment variable; use letters, digits and _")
        if name in OWNED_ENV or name.startswith("SPLITBENCH_"):
            raise ValueError(f"'{name}' is set by the plan; remove it here")
        if SECRET_NAME.search(name):
            raise ValueError(
                f"'{name}' looks like a secret, and every config is archived; export it in the shell instead"
            )
    return env


EngineArgs = Annotated[dict[str, ArgValue], _flag_names(OWNED_ARGS)]
ClientArgs = Annotated[dict[str, ArgValue], _flag_names(OWNED_CLIENT_ARGS)]
EngineEnv = Annotated[dict[str, str], AfterValidator(_env_names)]


class Section(BaseModel):
    """A part of the config: unknown keys are errors, values don't change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Stack(Section):
    """The pinned serving software: built from a lock by the workflow, or an environment that is there already."""

    name: Name = Field(description="what this stack is called in paths and reports")
    lock: Path | None = Field(None, description="lock file from which the serving environment is built")
    python: Path | None = Field(None, description="interpreter of a serving environment made elsewhere")
    packages: dict[str, str] = Field(
        default_factory=dict,
        description="versions that must be found there; with `python` this is what results are keyed by",
    )
    expects: Path | None = Field(
        None, description="stack file that the machine and this software are checked against before any cell"
    )
    torch_cpu_index: str = Field(
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
    path: Path | None = Field(None, description="folder with weights and tokenizer")
    hub: str | None = Field(None, description="hub id, fetched or found in the hub cache by vLLM")
    revision: str | None = Field(None, description="commit of the hub repository")

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


class EngineDefaults(Section):
    """What engines are started with; experiment, layout and engine level are merged in this order."""

    args: EngineArgs = Field(default_factory=dict, description="extra flags of `vllm serve`, without dashes")
    env: EngineEnv = Field(default_factory=dict, description="environment variables")
    startup_limit_s: PositiveFloat | None = Field(None, description="how long an engine may take to be ready")


class MpsShare(Section):
    """A part of a GPU's compute units, kept apart by CUDA MPS."""

    mps_percent: Annotated[int, Field(ge=1, le=100)] = Field(
        description="share of the GPU's compute units; of all engines on a GPU at most 100"
    )


class EngineSpec(EngineDefaults):
    """One engine: the devices it occupies and how it spreads over them."""

    cores: list[NonNegativeInt] | None = Field(None, min_length=1, description="CPU cores (CPU stack)")
    gpus: list[NonNegativeInt] | None = Field(None, min_length=1, description="GPU indices (CUDA stack)")
    node: Annotated[int, Field(ge=0, lt=MAX_NODES)] = Field(
        0, description="which node of a SLURM allocation has them; 0 is where client and proxy run"
    )
    tp: PositiveInt | None = Field(None, description="tensor parallel size; default: all GPUs given")
    pp: PositiveInt = Field(1, description="pipeline parallel size")
    dp: PositiveInt = Field(1, description="data parallel size")
    memory_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of each GPU's memory (vLLM's gpu-memory-utilization)"
    )
    kv_cache_bytes: PositiveInt | None = Field(
        None, description="size of the KV pool on each GPU, instead of what memory_share leaves"
    )
    share: MpsShare | Literal["time-sliced"] | None = Field(
        None,
        description="the GPUs are shared with other engines: by CUDA MPS, or in turns as the driver gives them",
    )
    port: Port | None = Field(None, description="fixed HTTP port; default: counted from node.base_port")

    @model_validator(mode="after")
    def _devices(self) -> Self:
        if (self.cores is None) == (self.gpus is None):
            raise ValueError("give exactly one of 'cores' and 'gpus'")
        devices = self.devices
        if len(set(devices)) != len(devices):
            raise ValueError(f"a device is named twice in {devices}")
        if self.gpus is not None and self.parallel != len(devices):
            raise ValueError(
                f"tp x pp x dp is {self.parallel} but {len(devices)} GPUs are given; make them equal"
            )
        if self.cores is not None and self.parallel != 1:
            raise ValueError("on CPU cores tp, pp and dp must be 1; start replicas instead")
        if self.share is not None and self.cores is not None:
            raise ValueError("'share' is for GPUs; give each engine cores of its own")
        for flag, key in MEMORY_ARGS.items():
            if flag in self.args and getattr(self, key) is not None:
                raise ValueError(f"memory is stated twice, by '{key}' and by args '{flag}'; keep one")
        return self

    @property
    def devices(self) -> list[int]:
        """Device indices, cores or GPUs."""
        return list(self.cores if self.cores is not None else self.gpus or [])

    @property
    def places(self) -> list[tuple[int, int]]:
        """Node and index of every device."""
        return [(self.node, device) for device in self.devices]

    @property
    def states_memory(self) -> bool:
        """Whether its part of a GPU's memory is stated, by field or by flag."""
        return any(
            getattr(self, key) is not None or self.args.get(flag) is not None
            for flag, key in MEMORY_ARGS.items()
        )

    @property
    def tensor_parallel(self) -> int:
        """Tensor parallel size with its default filled in."""
        if self.tp is not None:
            return self.tp
        return 1 if self.cores is not None else max(1, len(self.devices) // (self.pp * self.dp))

    @property
    def parallel(self) -> int:
        """Number of ranks."""
        return self.tensor_parallel * self.pp * self.dp


class AggregatedLayout(EngineSpec):
    """One engine that does prefill and decode."""

    kind: Literal["aggregated"] = Field(description="one engine that does prefill and decode")

    def engines(self) -> list[EngineSpec]:
        """The layout's engines."""
        return [self]


ROUTER = "the front door; vllm-router must be installed beside vLLM"
TRACE = "the proxy writes a line per request into the session's logs: when each stage was reached"


class ReplicasLayout(EngineDefaults):
    """Several equal aggregated engines behind a round-robin front."""

    kind: Literal["replicas"] = Field(description="equal engines behind a round-robin front")
    replicas: Annotated[list[EngineSpec], Field(min_length=2, description="the engines, two or more")]
    router: Router = Field("builtin", description=ROUTER)
    trace: bool = Field(False, description=TRACE)

    @model_validator(mode="after")
    def _trace_of_ours(self) -> Self:
        if self.trace and self.router != "builtin":
            raise ValueError("only the built-in proxy writes a trace; use router builtin")
        return self

    def engines(self) -> list[EngineSpec]:
        """The layout's engines."""
        return list(self.replicas)


def is_spread(engines: Iterable[EngineSpec]) -> bool:
    """Whether engines are on more than the node of the client."""
    return any(engine.node for engine in engines)


Engines = Annotated[list[EngineSpec], BeforeValidator(_one_or_many), Field(min_length=1)]


class PdLayout(EngineDefaults):
    """Prefill engines and decode engines with a proxy in front."""

    kind: Literal["pd"] = Field(description="prefill and decode on engines of their own")
    connector: Connector = Field(description="how KV cache moves from prefill to decode")
    prefill: Engines = Field(description="one engine or a list: those that compute prompts")
    decode: Engines = Field(description="one engine or a list: those that make the tokens")
    first_token: FirstToken | None = Field(
        None, description="who makes the first token; default by connector"
    )
    kv_buffer_device: Literal["cpu", "cuda"] | None = Field(
        None, description="where transfer buffers live; default: with the engine"
    )
    kv_buffer_gb: PositiveFloat = Field(
        2.0,
        description="LMCache's memory in GiB: the transfer buffer per rank, or (lmcache-mp) the whole cache",
    )
    kv_chunk_tokens: PositiveInt | None = Field(
        None, description="tokens in a chunk of lmcache-mp; default: 256, on cores 128 (vLLM's block there)"
    )
    connector_options: dict[str, ArgValue] = Field(
        default_factory=dict, description="further keys of vLLM's kv_connector_extra_config"
    )
    lmcache_options: dict[str, ArgValue] = Field(
        default_factory=dict, description="further keys of LMCache's own config file"
    )
    lmcache_repairs: list[Literal["packed-kv", "waited-saves"]] = Field(
        default_factory=list,
        description="faults of LMCache's in-process connector to mend: 'packed-kv' moves whole rows under vLLM 0.26 "
        "and later, where LMCache up to 0.5.4 loses half of them; 'waited-saves' waits until KV is in a transfer "
        "buffer on the GPU, which LMCache does not and which goes wrong where GPUs are shared",
    )
    router: Router = Field("builtin", description=ROUTER)
    trace: bool = Field(False, description=TRACE)

    @model_validator(mode="after")
    def _first_token_of_connector(self) -> Self:
        if self.connector == "nixl" and self.first_token == "prefiller":
            raise ValueError(f"connector '{self.connector}' always takes the first token from the decoder")
        if self.router == "vllm-router" and self.connector != "nixl":
            raise ValueError(f"router 'vllm-router' does not serve connector '{self.connector}'; use builtin")
        if self.trace and self.router != "builtin":
            raise ValueError("only the built-in proxy writes a trace; use router builtin")
        if self.connector == "lmcache":
            self._ranks_pair_up()
        elif self.lmcache_options or self.lmcache_repairs:
            raise ValueError(
                f"connector '{self.connector}' has no 'lmcache_options', 'lmcache_repairs'; remove them"
            )
        return self

    def _ranks_pair_up(self) -> None:
        """A sender's rank picks the receiver's ports by its own number, so each needs a partner."""
        if any(engine.pp > 1 or engine.dp > 1 for engine in self.engines()):
            raise ValueError("over connector 'lmcache' pp and dp must be 1; give more engines instead")
        senders = max(engine.tensor_parallel for engine in self.prefill)
        receivers = min(engine.tensor_parallel for engine in self.decode)
        if senders > receivers:
            raise ValueError(
                f"over connector 'lmcache' {senders} prefill ranks have only {receivers} decode ranks to send to; "
                "make tp of decode at least that of prefill, or use nixl"
            )

    def engines(self) -> list[EngineSpec]:
        """The layout's engines, prefill first."""
        return [*self.prefill, *self.decode]


Layout = Annotated[AggregatedLayout | ReplicasLayout | PdLayout, Field(discriminator="kind")]


class Prompts(Section):
    """How many prompts a cell sends."""

    per_concurrency: PositiveInt = Field(10, description="prompts per unit of concurrency")
    minimum: PositiveInt = Field(1, description="but never fewer than this")
    percentile: Annotated[float, Field(gt=0, lt=100)] | None = Field(
        None, description="nor fewer than one cell needs for an interval around this percentile (P99: 368)"
    )


class Ramp(Section):
    """An offered rate that changes while it is measured."""

    strategy: Literal["linear", "exponential"] = Field(
        "linear", description="how it gets from one to the other"
    )
    start_rate: PositiveInt = Field(description="requests per second at first")
    end_rate: PositiveInt = Field(description="requests per second at last")


FILE_DATASETS = ("sharegpt", "sonnet", "custom")


class Workload(Section):
    """What a request looks like and how requests arrive."""

    dataset: Literal["random", "prefix-repetition", "sharegpt", "sonnet", "custom"] = Field(
        "random",
        description="made-up tokens, made-up tokens with shared beginnings, a file in ShareGPT's form, a text file "
        "whose lines make up prompts, or JSON lines with a `prompt` each",
    )
    input_tokens: PositiveInt = Field(description="tokens per prompt; of files the typical number")
    output_tokens: PositiveInt = Field(description="tokens per answer; of ShareGPT files the typical number")
    path: Path | None = Field(None, description="the file of a dataset that is one")
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None, description="of that file: results are keyed by what it holds, not by where it lies"
    )
    range_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="random: lengths are drawn from this much below to this much above"
    )
    prefix_tokens: NonNegativeInt = Field(
        0, description="of input_tokens, those that prompts share at the start"
    )
    prefixes: PositiveInt | None = Field(None, description="prefix-repetition: number of distinct beginnings")
    request_rate: PositiveFloat | None = Field(
        None, description="offered requests per second (open loop); default: as fast as concurrency allows"
    )
    burstiness: PositiveFloat = Field(
        1.0, description="shape of the gaps at a finite rate: 1 is Poisson, below it comes in bursts"
    )
    ramp: Ramp | None = Field(None, description="a rate that changes, instead of request_rate")
    concurrency: Annotated[list[PositiveInt], Field(min_length=1)] | None = Field(
        None,
        description="caps for this workload instead of the matrix's; a high one leaves an open loop open",
    )
    prompts: Prompts = Field(Prompts(), description="how many prompts a cell sends")
    warmup_per_concurrency: NonNegativeInt = Field(
        1, description="warm-up requests per unit of concurrency, with prompts that are not measured"
    )
    extra_args: ClientArgs = Field(default_factory=dict, description="further flags of `vllm bench serve`")

    @model_validator(mode="after")
    def _fields_of_the_dataset(self) -> Self:
        is_file = self.dataset in FILE_DATASETS
        if is_file and (self.path is None or self.sha256 is None):
            raise ValueError(
                f"dataset '{self.dataset}' is a file: give 'path' and its 'sha256' (sha256sum FILE)"
            )
        if not is_file and (self.path is not None or self.sha256 is not None):
            raise ValueError(f"dataset '{self.dataset}' reads no file; remove 'path' and 'sha256'")
        if self.range_ratio and self.dataset != "random":
            raise ValueError(f"'range_ratio' is for dataset 'random', not '{self.dataset}'")
        if (self.prefixes is not None) != (self.dataset == "prefix-repetition"):
            raise ValueError("'prefixes' and dataset 'prefix-repetition' go together")
        if self.prefix_tokens and is_file:
            raise ValueError(f"'prefix_tokens' is for made-up prompts, not for dataset '{self.dataset}'")
        if self.prefix_tokens >= self.input_tokens:
            raise ValueError(
                f"prefix_tokens {self.prefix_tokens} leaves nothing of {self.input_tokens} input tokens"
            )
        return self

    @model_validator(mode="after")
    def _one_arrival(self) -> Self:
        if self.ramp is not None and self.request_rate is not None:
            raise ValueError("give 'request_rate' or 'ramp', not both")
        if self.burstiness != 1.0 and self.request_rate is None and self.ramp is None:
            raise ValueError("'burstiness' shapes the gaps of a finite rate: give 'request_rate' or 'ramp'")
        return self


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
    percentile: Annotated[float, Field(gt=0, lt=100)] = Field(
        99.0, description="the percentile that must keep the limits, in percent"
    )


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
    steal_percent: PositiveFloat = Field(5.0, description="of the processors that a hypervisor may take away")
    others_percent: PositiveFloat = Field(
        25.0, description="of one core that other processes may use, where engines run on cores"
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
    percentiles: tuple[float, ...] = Field((50.0, 99.0), description="marked on every curve, in percent")
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
    seed: NonNegativeInt = Field(0, description="from which prompts and the order of cells are drawn")
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
