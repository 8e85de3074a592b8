# SPDX-License-Identifier: Apache-2.0
"""Exact quantiles, distribution functions, and which percentiles a sample can support.

Values come as an array, or as a source of chunks that can be passed over more than once (`Chunks`), so that
50 million ITLs need no more memory than a few batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Chunks = Callable[[], Iterable[Floats]]
"""Gives the same values at every call, some at a time."""

_SIGN = np.uint64(1 << 63)
_LEVELS = (22, 21, 21)
"""Bits that each pass looks at, from the top; the first takes sign, exponent and 10 bits of the mantissa."""
_FIRST_SHIFT = np.uint64(64 - _LEVELS[0])
_COLLECT = 1 << 21
"""Values that may be held at once (16 MiB) when the last pass picks order statistics."""


class Curve(NamedTuple):
    """A step function: `y` is the share at and below (ECDF) or above (survival) each `x`; x ascends."""

    x: Floats
    y: Floats


@dataclass(frozen=True)
class Interval:
    """A confidence interval; an end that the sample cannot give is infinite."""

    low: float
    high: float
    confidence: float = 0.95


def quantiles(values: Floats | Chunks, ps: Sequence[float]) -> Floats:
    """Exact quantiles, linear between order statistics: equal to `numpy.quantile`, to the last bit.

    Args:
        values: an array, or a source of chunks; a NaN among them makes every quantile NaN.
        ps: levels from 0 to 1.

    Returns:
        One per level; NaN if there are no values.

    Raises:
        ValueError: a level outside 0 to 1.
    """
    levels = np.asarray(ps, dtype=np.float64)
    if not ((levels >= 0) & (levels <= 1)).all():
        raise ValueError(f"quantile levels must lie between 0 and 1, got {list(ps)}")
    if not callable(values):
        return np.asarray(np.quantile(values, levels)) if len(values) else np.full(len(levels), np.nan)
    return Distribution(values).quantiles(levels)


class Distribution:
    """The distribution of values that do not fit into memory, from one pass; quantiles take one or two more.

    Attributes:
        n: number of values.
        has_nan: whether a NaN is among them; every quantile is NaN then, as numpy has it.
    """

    def __init__(self, values: Chunks) -> None:
        self._values = values
        self._base = 0  # number of the bin that counts[0] counts
        self._counts = np.zeros(0, dtype=np.int64)
        self.n = 0
        self.has_nan = False
        for chunk in values():
            if not len(chunk):
                continue
            self.has_nan = self.has_nan or bool(np.isnan(chunk).any())
            bins = (_ordered_bits(chunk) >> _FIRST_SHIFT).astype(np.int64)
            lowest = int(bins.min())
            self._add(lowest, np.bincount(bins - lowest))
            self.n += len(chunk)

    def _add(self, base: int, counts: npt.NDArray[np.int64]) -> None:
        if not len(self._counts):
            self._base, self._counts = base, counts.astype(np.int64)
            return
        low = min(base, self._base)
        high = max(base + len(counts), self._base + len(self._counts))
        if (low, high) != (self._base, self._base + len(self._counts)):
            grown = np.zeros(high - low, dtype=np.int64)
            grown[self._base - low : self._base - low + len(self._counts)] = self._counts
            self._base, self._counts = low, grown
        self._counts[base - low : base - low + len(counts)] += counts

    def quantiles(self, ps: Sequence[float] | Floats) -> Floats:
        """Exact quantiles at these levels, linear between order statistics."""
        levels = np.asarray(ps, dtype=np.float64)
        if not self.n or self.has_nan:
            return np.full(len(levels), np.nan)
        places = levels * (self.n - 1)
        below = np.floor(places).astype(np.int64)
        above = np.minimum(below + 1, self.n - 1)
        ranks = np.unique(np.concatenate([below, above]))
        picked = dict(
            zip(ranks.tolist(), _order_statistics(self._values, ranks, self._base, self._counts), strict=True)
        )
        low = np.array([picked[rank] for rank in below.tolist()])
        high = np.array([picked[rank] for rank in above.tolist()])
        return _between(low, high, places - below)

    @property
    def ecdf(self) -> Curve:
        """The ECDF, exact at points that lie at most 0.1 % apart (relative) where there are values."""
        if not self.n or self.has_nan:
            return Curve(np.empty(0), np.empty(0))
        used = np.flatnonzero(self._counts)
        edges = (((used + self._base).astype(np.uint64) + np.uint64(1)) << _FIRST_SHIFT) - np.uint64(1)
        x = _from_ordered_bits(edges)
        # The last bin of the negative numbers ends just below zero, not at -0.0, which equals 0.0.
        x[(x == 0) & np.signbit(x)] = -np.finfo(np.float64).smallest_subnormal
        x[np.isnan(x)] = np.inf  # the bin of infinity reaches into the bit patterns of NaN
        return Curve(x, np.cumsum(self._counts[used]) / self.n)


def sorted_quantiles(values: Floats, ps: Sequence[float]) -> Floats:
    """`quantiles` of values that ascend already: a look-up, whatever their number.

    Args:
        values: ascending, finite.
        ps: levels from 0 to 1.
    """
    levels = np.asarray(ps, dtype=np.float64)
    if not len(values):
        return np.full(len(levels), np.nan)
    places = levels * (len(values) - 1)
    below = np.floor(places).astype(np.int64)
    above = np.minimum(below + 1, len(values) - 1)
    return _between(values[below], values[above], places - below)


def _between(low: Floats, high: Floats, share: Floats) -> Floats:
    """Linear interpolation with every rounding as numpy's quantile has it (`_lerp` in its source)."""
    with np.errstate(invalid="ignore"):
        gap = high - low
        return np.where(share >= 0.5, high - gap * (1 - share), low + gap * share)


def _ordered_bits(values: Floats) -> npt.NDArray[np.uint64]:
    """The bits of doubles as integers in the same order; the two zeros are one."""
    if not np.signbit(values).any():
        return np.ascontiguousarray(values, dtype=np.float64).view(np.uint64) | _SIGN
    bits = (np.asarray(values, dtype=np.float64) + 0.0).view(np.uint64)  # -0.0 + 0.0 is 0.0
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _from_ordered_bits(bits: npt.NDArray[np.uint64]) -> Floats:
    return np.where(bits & _SIGN, bits ^ _SIGN, ~bits).view(np.float64)


def _order_statistics(
    values: Chunks, ranks: npt.NDArray[np.int64], base: int, counts: npt.NDArray[np.int64]
) -> list[float]:
    """The values at these ranks (from 0), by radix selection; each pass narrows every rank to one bin.

    Args:
        values: the source.
        ranks: ascending and distinct.
        base: number of the first of these bins.
        counts: number of values in each bin of the first level.
    """
    resolved = _LEVELS[0]
    cumulated = np.cumsum(counts)
    bins = np.searchsorted(cumulated, ranks, side="right")
    prefixes = (bins + base).astype(np.uint64)
    rest = ranks - (cumulated[bins] - counts[bins])
    sizes = counts[bins]
    for width in (*_LEVELS[1:], 0):
        wanted, first = np.unique(prefixes, return_index=True)
        if width == 0 or sizes[first].sum() <= _COLLECT:
            break
        # Too many values share a prefix to hold them: count them by their next bits instead.
        table = np.zeros((len(wanted), 1 << width), dtype=np.int64)
        shift = np.uint64(64 - resolved)
        for chunk in values():
            bits = _ordered_bits(chunk)
            row, inside = _locate(wanted, bits >> shift)
            following = (bits[inside] >> np.uint64(64 - resolved - width)) & np.uint64((1 << width) - 1)
            np.add.at(table, (row[inside], following.astype(np.int64)), 1)
        for k in range(len(ranks)):
            line = table[int(np.searchsorted(wanted, prefixes[k]))]
            cumulated = np.cumsum(line)
            bin_ = int(np.searchsorted(cumulated, rest[k], side="right"))
            rest[k] -= cumulated[bin_] - line[bin_]
            sizes[k] = line[bin_]
            prefixes[k] = (prefixes[k] << np.uint64(width)) | np.uint64(bin_)
        resolved += width
    if resolved == 64:
        return [float(v) for v in _from_ordered_bits(prefixes)]
    return _collect(values, prefixes, rest, resolved)


def _locate(
    wanted: npt.NDArray[np.uint64], prefixes: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    row = np.minimum(np.searchsorted(wanted, prefixes), len(wanted) - 1)
    return row, wanted[row] == prefixes


def _collect(
    values: Chunks, prefixes: npt.NDArray[np.uint64], rest: npt.NDArray[np.int64], resolved: int
) -> list[float]:
    wanted = np.unique(prefixes)
    shift = np.uint64(64 - resolved)
    kept = []
    low = _from_ordered_bits(wanted << shift)
    high = _from_ordered_bits((wanted << shift) | np.uint64((1 << (64 - resolved)) - 1))
    # The bins of the infinities reach into the bit patterns of NaN.
    low, high = (
        np.nan_to_num(low, nan=-np.inf, neginf=-np.inf),
        np.nan_to_num(high, nan=np.inf, posinf=np.inf),
    )
    for chunk in values():
        inside = np.zeros(len(chunk), dtype=np.bool_)
        for a, b in zip(low, high, strict=True):
            inside |= (chunk >= a) & (chunk <= b)
        kept.append(chunk[inside])
    held = np.concatenate(kept)
    held_prefixes = _ordered_bits(held) >> shift
    return [float(np.sort(held[held_prefixes == p])[r]) for p, r in zip(prefixes, rest, strict=True)]


def ecdf(values: Floats | Chunks) -> Curve:
    """Share of values at or below each distinct value; for chunks, exact at points at most 0.1 % apart."""
    if callable(values):
        return Distribution(values).ecdf
    x, counts = np.unique(values, return_counts=True)
    return Curve(x, np.cumsum(counts) / max(len(values), 1))


def survival(values: Floats | Chunks) -> Curve:
    """Share of values above each distinct value; the last is 0, which a logarithmic axis leaves out."""
    x, y = ecdf(values)
    return Curve(x, 1.0 - y)


def ecdf_at(values: Floats | Chunks, points: Floats) -> Floats:
    """Share of values at or below each of the (ascending) points, exactly."""
    chunks: Iterable[Floats] = values() if callable(values) else (values,)
    total, n = np.zeros(len(points), dtype=np.int64), 0
    for chunk in chunks:
        # The first point that is not below the value is the first that counts it.
        total += np.bincount(np.searchsorted(points, chunk, side="left"), minlength=len(points) + 1)[:-1]
        n += len(chunk)
    return np.cumsum(total) / n if n else np.full(len(points), np.nan)


def needed(p: float, confidence: float = 0.95) -> int:
    """Independent values needed for a two-sided distribution-free interval of the p-quantile with both ends.

    The largest of n values lies above the p-quantile but with chance p^n, and the same holds mirrored for the
    smallest: P90 needs 36, P95 72, P99 368, P99.5 736, P99.9 3,688 values at 95 %.

    Raises:
        ValueError: p not strictly between 0 and 1.
    """
    if not 0 < p < 1:
        raise ValueError(f"no sample size supports the quantile {p}")
    tail = (1 - confidence) / 2
    return math.ceil(math.log(tail) / math.log(max(p, 1 - p)))


def quantile_interval(values: Floats, p: float, confidence: float = 0.95) -> Interval:
    """Distribution-free interval of the p-quantile of independent values, from two order statistics.

    Each end's chance to miss is at most half of what the confidence leaves, for any continuous distribution;
    an end that the sample cannot give is infinite. For request-level metrics only: ITLs are not independent.
    """
    from scipy.stats import binom  # takes a second to load, and every part's checks load this module

    n = len(values)
    tail = (1 - confidence) / 2
    # The l-th smallest lies above the quantile if fewer than l values lie below it: a binomial count.
    low_rank = int(binom.ppf(tail, n, p)) if n else 0
    if low_rank > 0 and binom.cdf(low_rank - 1, n, p) > tail:
        low_rank -= 1
    high_rank = int(binom.ppf(1 - tail, n, p)) + 1 if n else 1
    ordered = np.sort(values)
    low = float(ordered[low_rank - 1]) if low_rank >= 1 else -math.inf
    high = float(ordered[high_rank - 1]) if high_rank <= n else math.inf
    return Interval(low, high, confidence)


@dataclass(frozen=True)
class Gate:
    """Whether n independent values support a percentile.

    Attributes:
        p: the level, 0 to 1.
        n: independent values (requests, also where the metric is an ITL).
        needs: how many the level needs.
    """

    p: float
    n: int
    needs: int

    @property
    def supported(self) -> bool:
        """Whether the percentile may be printed as a plain number."""
        return self.n >= self.needs

    def text(self, value: float, bound: float | None = None, digits: int = 1) -> str:
        """The percentile as it may be printed.

        Args:
            value: the sample's quantile.
            bound: the end of its interval that the sample does give (lower for a high percentile); `value` if
                None.
            digits: after the point.
        """
        if self.n == 0 or math.isnan(value):
            return f"none (n={self.n})"
        if self.supported:
            return f"{value:.{digits}f}"
        sign = ">=" if self.p >= 0.5 else "<="
        shown = value if bound is None or not math.isfinite(bound) else bound
        return f"{sign} {shown:.{digits}f} (n={self.n}, needs {self.needs})"


def sample_gate(p: float, n: int, confidence: float = 0.95) -> Gate:
    """The gate : does a sample of n independent values support the p-quantile?"""
    return Gate(p, n, needed(p, confidence))


@dataclass(frozen=True)
class Reading:
    """A quantile with its interval and gate, ready to print."""

    p: float
    value: float
    interval: Interval
    gate: Gate

    @property
    def text(self) -> str:
        """The percentile as it may be printed, as in `>= 12.3 (n=320, needs 368)`."""
        return self.gate.text(self.value, self.interval.low if self.p >= 0.5 else self.interval.high)


def read_quantile(values: Floats, p: float, confidence: float = 0.95) -> Reading:
    """Quantile, interval and gate of a request-level metric."""
    value = float(quantiles(values, [p])[0])
    gate = sample_gate(p, len(values), confidence)
    return Reading(p, value, quantile_interval(values, p, confidence), gate)
