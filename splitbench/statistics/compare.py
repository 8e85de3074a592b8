# SPDX-License-Identifier: Apache-2.0
"""One comparison of two layouts at one load, as verdicts, claims and figures share it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from splitbench.statistics.bootstrap import Difference, paired_differences, paired_mean_difference
from splitbench.statistics.pools import Pool, Pools
from splitbench.statistics.quantiles import Gate

MEAN = "mean"


def level_of(statistic: str) -> float | None:
    """0.99 for `p99`; None for `mean`."""
    return None if statistic == MEAN else float(statistic[1:]) / 100


def statistic_of(percentile: float) -> str:
    """`p99` for 99."""
    return f"p{percentile:g}"


@dataclass(frozen=True)
class Compared:
    """How a layout differs from its reference; a lower latency is the better one.

    Attributes:
        metric, statistic: what was compared, as in `itl_ms` and `p99`.
        load: concurrency (or rate).
        reference_ms, layout_ms: the two values.
        change: layout over reference, less 1.
        low, high: its 95 % interval; infinite where the sample cannot give an end.
        gate: whether the smaller sample supports the statistic.
        level, units, paired: what was drawn again, how many, and whether together.
        apart: the nodes of the reference and of the layout, where they share none: then it is not known whether the
            layout makes the difference or the machine, and nothing is decided.
    """

    metric: str
    statistic: str
    load: float
    reference_ms: float
    layout_ms: float
    change: float
    low: float
    high: float
    gate: Gate
    level: str
    units: int
    paired: bool
    apart: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    @property
    def supported(self) -> bool:
        """Whether it can decide anything: enough samples, and no other machines."""
        return self.gate.supported and self.apart is None

    def finding(self, margin: float) -> str:
        """`better`, `worse` or `same` than the reference, by at least (within) the margin; else `unclear`.

        Args:
            margin: a share, as in 0.05.
        """
        if not self.supported or math.isnan(self.change):
            return "unclear"
        if self.high < -margin:
            return "better"
        if self.low > margin:
            return "worse"
        return "same" if self.low >= -margin and self.high <= margin else "unclear"

    def record(self) -> dict[str, Any]:
        """As JSON; an end that is not known is null."""
        nodes = {} if self.apart is None else {"nodes": [list(names) for names in self.apart]}
        return nodes | {
            "metric": self.metric,
            "statistic": self.statistic,
            "load": self.load,
            "reference_ms": finite(self.reference_ms),
            "layout_ms": finite(self.layout_ms),
            "change": finite(self.change),
            "low": finite(self.low),
            "high": finite(self.high),
            "supported": self.supported,
            "n": self.gate.n,
            "needs": self.gate.needs,
            "level": self.level,
            "units": self.units,
            "paired": self.paired,
        }


def finite(value: float) -> float | None:
    """A number for JSON, rounded to nine digits that count; None for NaN and infinity."""
    return float(f"{value:.9g}") if math.isfinite(value) else None


def compared(
    pools: Pools, workload: str, reference: str, layout: str, load: float, metric: str, statistic: str
) -> Compared | None:
    """Compare two layouts at one load; None where either has no valid cell with this latency."""
    a = pools.sample(workload, reference, load, metric)
    b = pools.sample(workload, layout, load, metric)
    if a is None or b is None:
        return None
    level = level_of(statistic)
    found = paired_mean_difference(a, b) if level is None else paired_differences(a, b, [level])[0]
    nodes = apart(pools.pool(workload, reference, load), pools.pool(workload, layout, load))
    return replace(from_difference(found, metric, statistic, load), apart=nodes)


def apart(reference: Pool, layout: Pool) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The nodes of two pools where none is in both; None where one is, or nodes are not known."""
    nodes = tuple(sorted(set(reference.nodes))), tuple(sorted(set(layout.nodes)))
    return nodes if all(nodes) and not set(nodes[0]) & set(nodes[1]) else None


def from_difference(found: Difference, metric: str, statistic: str, load: float) -> Compared:
    """The comparison that a difference states."""
    low = -1.0 if found.interval.low == -math.inf else found.interval.low
    return Compared(
        metric=metric,
        statistic=statistic,
        load=load,
        reference_ms=found.a,
        layout_ms=found.b,
        change=found.change,
        low=-math.inf if low <= -1.0 else low,
        high=found.interval.high,
        gate=found.gate,
        level=found.level,
        units=found.units,
        paired=found.paired,
    )
