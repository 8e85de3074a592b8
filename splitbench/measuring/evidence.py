# SPDX-License-Identifier: Apache-2.0
"""What checks look at and what they say; plain data, so that a check can be tested on a made-up cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from splitbench.experiment.models import Thresholds
from splitbench.measuring.floor import Floor
from splitbench.measuring.logs import EngineLog
from splitbench.measuring.metrics import Metrics, growth

Verdict = Literal["ok", "warn", "invalid"]
_RANK: dict[Verdict, int] = {"ok": 0, "warn": 1, "invalid": 2}


@dataclass(frozen=True)
class Check:
    """One verdict on one cell."""

    name: str
    verdict: Verdict
    reason: str
    figures: dict[str, float | int | str | None] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def worst(checks: Sequence[Check]) -> Verdict:
    """The cell's verdict: its worst check."""
    return max((check.verdict for check in checks), key=_RANK.__getitem__, default="ok")


@dataclass(frozen=True)
class EngineEvidence:
    """An engine's own counters around the measured requests."""

    role: str
    before: Metrics
    after: Metrics

    def growth(self, name: str, **labels: str) -> float | None:
        """How much a counter grew during the cell."""
        return growth(self.before, self.after, name, **labels)


@dataclass(frozen=True)
class Series:
    """Samples of one metric of one thing during a cell.

    Attributes:
        source: `client`, `engine:<name>`, `proxy`, `gpu:<index>` or `host`.
        metric: name with its unit.
        times_s: seconds after the cell's start, rising.
        values: as many samples.
    """

    source: str
    metric: str
    times_s: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class Evidence:
    """Everything a check may look at; what was not recorded is None or empty, and the checks say so.

    Attributes:
        bench: the client's detailed result; its lists run over requests in the order of submission, seconds.
        concurrency: cap on requests in flight; None: there is none.
        request_rate: offered requests per second; None: unlimited.
        ramped: whether the offered rate changed on purpose while it was measured.
        exact_lengths: whether the workload asks for exact lengths (a file's prompts have their own).
        shared_percent: of each prompt, what it shares with others on purpose: it may come from the prefix cache.
        clock_start_s: the client's clock when the cell began; start times count from the same zero.
        logs: what each engine wrote, by engine.
        series: telemetry.
        client_loop: how late the client's event loop was while it measured (`p50_ms`, `p99_ms`); None: not known.
        processors: of the machine.
        foreign: what somebody else had on the devices, in words.
        smoke: what the session's smoke test found.
        transports: what the layout states for the KV transfer (`UCX_TLS`), by engine.
        chunk_tokens: only whole chunks of so many tokens move, the rest is computed; None: all of a prompt moves.
        floor: what the client itself adds to an ITL at this load; None: not measured.
        percentiles: percentiles that are asked of the cell, in percent.
        pooled_cells: cells (restarts and repeats) that are taken together before a percentile is read.
    """

    kind: str
    prompts: int
    input_tokens: int
    output_tokens: int
    concurrency: int | None
    warmups: int
    warmup_seed_differs: bool
    bench: Mapping[str, Any]
    engines: Mapping[str, EngineEvidence]
    thresholds: Thresholds = field(default_factory=Thresholds)
    connector: str | None = None
    request_rate: float | None = None
    ramped: bool = False
    exact_lengths: bool = True
    shared_percent: float = 0.0
    clock_start_s: float | None = None
    on_gpus: bool = False
    logs: Mapping[str, EngineLog] = field(default_factory=dict)
    series: Sequence[Series] = ()
    client_loop: Mapping[str, float] | None = None
    processors: int = 1
    foreign: Sequence[str] = ()
    smoke: Mapping[str, Any] | None = None
    transports: Mapping[str, str] = field(default_factory=dict)
    chunk_tokens: int | None = None
    floor: Floor | None = None
    percentiles: Sequence[float] = ()
    pooled_cells: int = 1

    @property
    def good(self) -> list[int]:
        """Indices of the requests that succeeded."""
        return [index for index, error in enumerate(self.bench["errors"]) if not error]

    def of_role(self, *roles: str) -> list[EngineEvidence]:
        """Engines that have one of these roles."""
        return [engine for engine in self.engines.values() if engine.role in roles]

    def sampled(self, metric: str, source: str = "") -> list[Series]:
        """Series of a metric whose source starts like this."""
        return [one for one in self.series if one.metric == metric and one.source.startswith(source)]
