# SPDX-License-Identifier: Apache-2.0
"""What an SLO costs: goodput per accelerator, price per million tokens, largest load served, break-even."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splitbench.statistics.quantiles import Interval
from splitbench.statistics.slo import Attainment, mean_with_interval


@dataclass(frozen=True)
class Run:
    """One run (cell) as the money sees it.

    Attributes:
        unit: the independent unit it belongs to (its server start).
        duration_s: of the measurement.
        met: requests that kept the SLO.
        met_output_tokens: output tokens of these requests.
    """

    unit: int
    duration_s: float
    met: int
    met_output_tokens: int


@dataclass(frozen=True)
class Rate:
    """A rate with its interval; the interval is unbounded with fewer than two independent units."""

    value: float
    interval: Interval
    units: int


def _rate(runs: Sequence[Run], what: str, per: float, confidence: float) -> Rate:
    by_unit: dict[int, list[Run]] = {}
    for run in runs:
        by_unit.setdefault(run.unit, []).append(run)
    rates = []
    for group in by_unit.values():
        seconds = sum(run.duration_s for run in group)
        rates.append(sum(getattr(run, what) for run in group) / seconds / per if seconds > 0 else math.nan)
    mean, interval = mean_with_interval(rates, confidence)
    low = max(interval.low, 0.0) if math.isfinite(interval.low) else 0.0
    return Rate(mean, Interval(low, interval.high, confidence), len(rates))


def goodput(runs: Sequence[Run], budget: int, confidence: float = 0.95) -> Rate:
    """Requests per second and accelerator that keep the SLO; every accelerator of the layout counts."""
    return _rate(runs, "met", budget, confidence)


def token_goodput(runs: Sequence[Run], budget: int, confidence: float = 0.95) -> Rate:
    """Output tokens per second and accelerator of the requests that keep the SLO."""
    return _rate(runs, "met_output_tokens", budget, confidence)


@dataclass(frozen=True)
class Cost:
    """Price of a million output tokens, in the currency of the price; infinite if nothing kept the SLO."""

    value: float
    interval: Interval


def cost_per_million(
    runs: Sequence[Run], budget: int, price_per_hour: float, confidence: float = 0.95
) -> Cost:
    """Price of a million output tokens at the SLO: only tokens of requests that keep it are sold.

    Args:
        runs: the runs of one layout at one load.
        budget: accelerators of the layout.
        price_per_hour: of one accelerator.
        confidence: of the interval.
    """
    rate = token_goodput(runs, budget, confidence)

    def price(tokens_per_s: float) -> float:
        if math.isinf(tokens_per_s):
            return 0.0
        return price_per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s > 0 else math.inf

    return Cost(price(rate.value), Interval(price(rate.interval.high), price(rate.interval.low), confidence))


@dataclass(frozen=True)
class Point:
    """A layout at one load (concurrency or request rate)."""

    load: float
    attainment: Attainment


@dataclass(frozen=True)
class Capacity:
    """The largest load that a layout serves within the SLO.

    Attributes:
        served: the largest load up to which every tested load reaches the wanted share; None if not even the
            lowest.
        proven: the same with the whole interval above the wanted share.
        failing: the next tested load, which does not reach it; None if every tested load does.
    """

    served: float | None
    proven: float | None
    failing: float | None

    @property
    def text(self) -> str:
        """As it may be printed: `16`, `>= 32` where nothing larger was tested, `< 1` if nothing is."""
        if self.served is None:
            return "none" if self.failing is None else f"< {self.failing:g}"
        return f"{self.served:g}" if self.failing is not None else f">= {self.served:g}"


def largest_load(points: Sequence[Point], wanted: float) -> Capacity:
    """Largest load at which the wanted share of requests keeps the SLO.

    A load above one that fails does not count, even if it passes: a layout is not served by luck.

    Args:
        points: one per tested load, in any order.
        wanted: share, 0 to 1.
    """
    served = proven = failing = None
    all_proven = True
    for point in sorted(points, key=lambda p: p.load):
        if point.attainment.share < wanted:
            failing = point.load
            break
        served = point.load
        all_proven = all_proven and point.attainment.interval.low >= wanted
        proven = point.load if all_proven else proven
    return Capacity(served, proven, failing)


@dataclass(frozen=True)
class BreakEven:
    """Where one layout begins to beat another along an axis.

    Attributes:
        at: the place where the difference passes zero; None if it keeps its sign over the whole axis.
        interval: of the place; an infinite end lies outside what was measured.
        better_below: `a` or `b`: which one is better below it (throughout, where there is none).
    """

    at: float | None
    interval: Interval | None
    better_below: str


def break_even(axis: Sequence[float], changes: Sequence[float], intervals: Sequence[Interval]) -> BreakEven:
    """Break-even of layout `b` against the budget-matched `a` along concurrency, rate or input length.

    Between measured places the change is taken as linear in the logarithm of the axis. The ends of the
    interval are where the ends of the changes' intervals pass zero, so an uncertain change gives a wide
    interval.

    Args:
        axis: measured places, ascending and positive.
        changes: change of b against a at each, in a metric of which less is better (as in
            `Difference.change`).
        intervals: of the changes.
    """
    places = np.log(np.asarray(axis, dtype=np.float64))
    lines = [list(changes), [i.low for i in intervals], [i.high for i in intervals]]
    middle = _zero(places, lines[0])
    better_below = "a" if lines[0][0] > 0 else "b"
    if middle is None:
        return BreakEven(None, None, better_below)
    ends = [_zero(places, line) for line in lines[1:]]
    known = sorted(math.exp(end) for end in ends if end is not None)
    at = math.exp(middle)
    low = next((end for end in known if end <= at), -math.inf)
    high = next((end for end in reversed(known) if end >= at), math.inf)
    return BreakEven(at, Interval(low, high), better_below)


def _zero(places: np.ndarray[tuple[int], np.dtype[np.float64]], line: Sequence[float]) -> float | None:
    for k in range(len(line) - 1):
        a, b = line[k], line[k + 1]
        if a == 0:
            return float(places[k])
        if (a < 0) != (b < 0) and math.isfinite(a) and math.isfinite(b):
            return float(places[k] + (places[k + 1] - places[k]) * a / (a - b))
    return float(places[-1]) if len(line) and line[-1] == 0 else None
