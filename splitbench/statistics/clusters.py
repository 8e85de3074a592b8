# SPDX-License-Identifier: Apache-2.0
"""Shares and quantiles of values that depend on each other, as the ITLs of a request or of a server start do.

What varies independently is the *unit*: the server start (restart) where there are two or more, else the run,
else the request. A unit carries everything that varies inside it, so the spread between units is the whole
uncertainty, and with few units Student's t pays for knowing that spread badly. The interval of a quantile is
made in the probability scale and read back through the values (Woodruff 1952), as a beta interval with the
effective number of independent values (Korn and Graubard 1998); with independent values it becomes the
binomial interval of the order statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, stdtrit  # of Student's t and beta; scipy.stats takes a second to load

from splitbench.statistics.quantiles import Distribution, Floats, Gate, Interval, sample_gate

Ints = npt.NDArray[np.int64]
Labelled = Callable[[], Iterable[tuple[Floats, Ints | int]]]
"""Gives, at every call, values some at a time, each with its unit's number (or one for the whole chunk)."""


@dataclass(frozen=True)
class Clustered:
    """Values with the units that vary independently.

    Attributes:
        values: the values and their units, numbered from 0.
        units: number of units.
        level: what a unit is: `restart`, `run` or `request`.
        requests: number of requests behind the values.
    """

    values: Labelled
    units: int
    level: str
    requests: int

    def chunks(self) -> Iterable[Floats]:
        """The values alone."""
        for values, _ in self.values():
            yield values


def clustered(values: Floats, labels: Ints, level: str, requests: int | None = None) -> Clustered:
    """Values in memory with one unit label each (any whole numbers)."""
    _, numbered = np.unique(labels, return_inverse=True)
    numbered = numbered.astype(np.int64)
    units = int(numbered.max()) + 1 if len(numbered) else 0
    return Clustered(
        lambda: [(values, numbered)], units, level, len(values) if requests is None else requests
    )


def counts_below(sample: Clustered, threshold: float) -> tuple[Floats, Floats]:
    """Per unit: how many values are at or below the threshold, and how many there are."""
    below, total = np.zeros(sample.units), np.zeros(sample.units)
    for values, label in sample.values():
        under = values <= threshold
        if isinstance(label, int | np.integer):
            below[label] += np.count_nonzero(under)
            total[label] += len(values)
        else:
            below += np.bincount(label, weights=under, minlength=sample.units)
            total += np.bincount(label, minlength=sample.units)
    return below, total


class Effective(NamedTuple):
    """A share, and how many independent values would know it as well.

    Attributes:
        share: hits over all values.
        size: effective number of independent values, less the price of few units; NaN with fewer than two.
        price: factor by which few units made it smaller; 1 is none.
    """

    share: float
    size: float
    price: float


def _price(units: int, n: float) -> float:
    """Factor that widens an interval as Student's t does with one degree of freedom per unit less one."""
    return float((stdtrit(max(n - 1, 1), 0.975) / stdtrit(units - 1, 0.975)) ** 2)


def effective_size(hits: Floats, totals: Floats) -> Effective:
    """Share over all units and the effective number of values behind it.

    Args:
        hits: per unit, how many values are hits.
        totals: per unit, how many values there are.
    """
    units, n = len(totals), float(totals.sum())
    share = float(hits.sum() / n) if n else math.nan
    if units < 2 or not n:
        return Effective(share, math.nan, 1.0)
    price = _price(units, n)
    spread = float(np.sum(((hits - share * totals) / n) ** 2)) * units / (units - 1)
    # No spread at all between the units: their number of values is all that is left to go by.
    independent = share * (1 - share) / spread if spread > 0 else n
    return Effective(share, independent * price, price)


def share_interval(known: Effective, confidence: float = 0.95) -> Interval:
    """Interval of a share; 0 to 1 if nothing is known.

    Between the exact binomial interval (Clopper and Pearson), which steps by one whole value, and Jeffreys'
    without such a step: the step shrinks as the size does by the price of few units.
    """
    share, size, price = known
    if not size > 0 or math.isnan(share):
        return Interval(0.0, 1.0, confidence)
    tail, step = (1 - confidence) / 2, price / 2
    hits, misses = share * size, (1 - share) * size
    low = float(betaincinv(hits + 0.5 - step, misses + 0.5 + step, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 0.5 + step, misses + 0.5 - step, 1 - tail)) if misses > 0 else 1.0
    return Interval(low, high, confidence)


def clustered_share(hits: Floats, totals: Floats, confidence: float = 0.95) -> tuple[float, Interval]:
    """A share and its interval from counts per unit, as in the share of requests that meet an SLO."""
    known = effective_size(np.asarray(hits, np.float64), np.asarray(totals, np.float64))
    return known.share, share_interval(known, confidence)


@dataclass(frozen=True)
class ClusteredReading:
    """A quantile of clustered values, ready to print.

    Attributes:
        p: the level, 0 to 1.
        value: the exact quantile of all values.
        interval: its interval; an end that the sample cannot give is infinite.
        gate: whether the number of requests supports the level.
        level: what was taken as independent: `restart`, `run` or `request`.
        units: how many of these there are.
    """

    p: float
    value: float
    interval: Interval
    gate: Gate
    level: str
    units: int

    @property
    def text(self) -> str:
        """The percentile as it may be printed, as in `>= 12.3 (n=320, needs 368)`."""
        return self.gate.text(self.value, self.interval.low if self.p >= 0.5 else self.interval.high)


def clustered_quantile(sample: Clustered, p: float, confidence: float = 0.95) -> ClusteredReading:
    """Quantile of clustered values with its interval; a few passes over the values, none holds them all.

    Args:
        sample: the values and their units.
        p: the level, strictly between 0 and 1.
        confidence: of the two-sided interval.
    """
    distribution = Distribution(sample.chunks)
    value = float(distribution.quantiles([p])[0])
    gate = sample_gate(p, sample.requests, confidence)
    low, high = -math.inf, math.inf
    if distribution.n and not distribution.has_nan:
        known = effective_size(*counts_below(sample, value))
        size, tail = known.size, (1 - confidence) / 2
        if size > 0:
            bounds = share_interval(known._replace(share=p), confidence)
            ends = distribution.quantiles([bounds.low, bounds.high])
            low = float(ends[0]) if (1 - p) ** size <= tail else -math.inf
            high = float(ends[1]) if p**size <= tail else math.inf
    return ClusteredReading(p, value, Interval(low, high, confidence), gate, sample.level, sample.units)
