# SPDX-License-Identifier: Apache-2.0
"""Cluster bootstrap: whole units are drawn again, and what lies inside a unit comes with it.

Units are server starts where there are two or more, else runs, else requests (see `clusters`). Drawing the
levels below as well would count their spread twice, since it is part of the spread between units already.
Each draw takes one unit fewer than there are and weighs it up accordingly, which makes the spread of the
draws an unbiased estimate of the variance (Rao and Wu 1988); Student's t turns it into an interval that stays
honest with three units. Seeds are fixed and recorded in every result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import expit, logit, stdtrit

from splitbench.statistics.clusters import Clustered
from splitbench.statistics.quantiles import Distribution, Floats, Gate, Interval, sample_gate

DRAWS = 999
SEED = 20_260_101
_LEVELS = expit(np.linspace(logit(1e-3), logit(1 - 1e-5), 700))


def unit_weights(units: int, draws: int = DRAWS, seed: int = SEED) -> Floats:
    """Weight of every unit in every draw; each row sums to the number of units.

    Returns:
        Array of shape (draws, units); all ones where there is a single unit, which says nothing about its
        spread.
    """
    if units < 2:
        return np.ones((draws, units))
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(units - 1, np.full(units, 1 / units), size=draws)
    return np.asarray(counts * (units / (units - 1)), dtype=np.float64)


def interval_of_draws(estimate: float, draws: Floats, units: int, confidence: float = 0.95) -> Interval:
    """Interval around an estimate from the spread of its draws and Student's t for the number of units."""
    if units < 2 or not math.isfinite(estimate) or not np.isfinite(draws).all():
        return Interval(-math.inf, math.inf, confidence)
    reach = float(stdtrit(units - 1, (1 + confidence) / 2) * np.std(draws, ddof=1))
    return Interval(estimate - reach, estimate + reach, confidence)


class _Curves:
    """One sample's quantile function, for the whole sample and for every draw."""

    def __init__(self, sample: Clustered, weights: Floats) -> None:
        self.exact = Distribution(sample.chunks)
        self._edges = np.unique(np.concatenate([self.exact.quantiles([0.0]), self.exact.quantiles(_LEVELS)]))
        self._edges = np.append(self._edges, self.exact.quantiles([1.0]))
        below = np.zeros((sample.units, len(self._edges)))
        for values, label in sample.values():
            bins = np.searchsorted(self._edges, values, side="left")
            flat = bins + np.asarray(label) * len(self._edges)
            below += np.bincount(flat, minlength=below.size).reshape(below.shape)
        totals = below.sum(axis=1)
        self._shares = np.cumsum(weights @ below, axis=1) / (weights @ totals)[:, None]

    def draws(self, ps: Floats) -> Floats:
        """Quantiles of every draw, linear between the points that were counted; shape (draws, len(ps))."""
        return np.array([np.interp(ps, shares, self._edges) for shares in self._shares])


def _two_curves(a: Clustered, b: Clustered, draws: int, seed: int) -> tuple[_Curves, _Curves, bool]:
    paired = a.units == b.units and a.level == b.level
    weights = unit_weights(a.units, draws, seed)
    others = weights if paired else unit_weights(b.units, draws, seed + 1)
    return _Curves(a, weights), _Curves(b, others), paired


@dataclass(frozen=True)
class Difference:
    """How much a quantile of `b` differs from that of `a`.

    Attributes:
        p: the level.
        a, b: the exact quantiles.
        change: b / a - 1: negative where b is lower.
        interval: of the change.
        gate: whether the smaller of the samples supports the level.
        level, units: what was drawn again, and how many there are (of the side with fewer).
        paired: whether unit k of both sides was drawn together (same prompts).
        draws, seed: of the bootstrap.
    """

    p: float
    a: float
    b: float
    change: float
    interval: Interval
    gate: Gate
    level: str
    units: int
    paired: bool
    draws: int
    seed: int


def paired_differences(
    a: Clustered,
    b: Clustered,
    ps: Sequence[float],
    confidence: float = 0.95,
    draws: int = DRAWS,
    seed: int = SEED,
) -> list[Difference]:
    """Relative difference of quantiles between two layouts, with intervals.

    Args:
        a: the reference.
        b: the other layout; if it has as many units at the same level, unit k is paired with unit k of `a`.
        ps: levels strictly between 0 and 1.
        confidence: of each interval (not adjusted for their number).
        draws: of the bootstrap.
        seed: of the bootstrap.
    """
    left, right, paired = _two_curves(a, b, draws, seed)
    levels = np.asarray(ps, dtype=np.float64)
    exact_a, exact_b = left.exact.quantiles(levels), right.exact.quantiles(levels)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(right.draws(levels)) - np.log(left.draws(levels))
        estimates = np.log(exact_b) - np.log(exact_a)
    units = min(a.units, b.units)
    result = []
    for k, p in enumerate(levels.tolist()):
        ends = interval_of_draws(float(estimates[k]), logs[:, k], units, confidence)
        result.append(
            Difference(
                p=p,
                a=float(exact_a[k]),
                b=float(exact_b[k]),
                change=float(np.expm1(estimates[k])),
                interval=Interval(_expm1(ends.low), _expm1(ends.high), confidence),
                gate=sample_gate(p, min(a.requests, b.requests), confidence),
                level=a.level if a.units <= b.units else b.level,
                units=units,
                paired=paired,
                draws=draws,
                seed=seed,
            )
        )
    return result


def paired_mean_difference(
    a: Clustered, b: Clustered, confidence: float = 0.95, draws: int = DRAWS, seed: int = SEED
) -> Difference:
    """Relative difference of the means, as `paired_differences` does for quantiles; its `p` is NaN.

    A mean asks for no more requests than a median does.
    """
    paired = a.units == b.units and a.level == b.level
    weights = unit_weights(a.units, draws, seed)
    others = weights if paired else unit_weights(b.units, draws, seed + 1)
    exact_a, means_a = _means(a, weights)
    exact_b, means_b = _means(b, others)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(means_b) - np.log(means_a)
        estimate = float(np.log(exact_b) - np.log(exact_a))
    units = min(a.units, b.units)
    ends = interval_of_draws(estimate, logs, units, confidence)
    return Difference(
        p=math.nan,
        a=exact_a,
        b=exact_b,
        change=_expm1(estimate),
        interval=Interval(_expm1(ends.low), _expm1(ends.high), confidence),
        gate=sample_gate(0.5, min(a.requests, b.requests), confidence),
        level=a.level if a.units <= b.units else b.level,
        units=units,
        paired=paired,
        draws=draws,
        seed=seed,
    )


def _means(sample: Clustered, weights: Floats) -> tuple[float, Floats]:
    """Mean of a sample, and of every draw."""
    sums, totals = np.zeros(sample.units), np.zeros(sample.units)
    for values, label in sample.values():
        labels = np.broadcast_to(np.asarray(label), len(values))
        sums += np.bincount(labels, weights=values, minlength=sample.units)
        totals += np.bincount(labels, minlength=sample.units)
    if not totals.sum():
        return math.nan, np.full(len(weights), math.nan)
    return float(sums.sum() / totals.sum()), np.asarray((weights @ sums) / (weights @ totals))


def _expm1(value: float) -> float:
    return math.expm1(value) if value < 700 else math.inf


@dataclass(frozen=True)
class Crossing:
    """The level at which two quantile functions cross.

    Attributes:
        p: the level; None if one sample lies below the other throughout.
        interval: of the level; None with `p`.
        lower_below: `a` or `b`: which one is lower below the crossing (throughout, where there is none).
        share: share of the draws in which the curves cross this way round.
        units, draws, seed: of the bootstrap.
    """

    p: float | None
    interval: Interval | None
    lower_below: str
    share: float
    units: int
    draws: int
    seed: int


def crossing_quantile(
    a: Clustered,
    b: Clustered,
    lowest: float = 0.5,
    confidence: float = 0.95,
    draws: int = DRAWS,
    seed: int = SEED,
) -> Crossing:
    """Level from `lowest` up at which the order of two samples turns, as in "PD is better only above P99.5".

    Of several sign changes the one is taken that parts the curves best: it maximises the area between them
        with one
    sign below and the other above, over log(1 - p), so that noise at the far end makes no crossing of its
    own.

    Args:
        a: one sample.
        b: the other.
        lowest: where the search begins.
        confidence: of the interval.
        draws: of the bootstrap.
        seed: of the bootstrap.
    """
    left, right, _ = _two_curves(a, b, draws, seed)
    # Beyond the last supported level every order is chance.
    top = -math.log10(max(1 - lowest, 1e-9)), math.log10(max(min(a.requests, b.requests), 2))
    scale = np.linspace(top[0], max(top[1], top[0] + 0.1), 240)
    levels = 1 - 10.0**-scale
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.log(right.exact.quantiles(levels)) - np.log(left.exact.quantiles(levels))
        drawn = np.log(right.draws(levels)) - np.log(left.draws(levels))
    units = min(a.units, b.units)
    place, sign = _turn(exact)
    turns = [_turn(line) for line in drawn]
    same = np.array([scale[k] for k, s in turns if k is not None and s == sign])
    lower_below = "a" if sign > 0 else "b"
    share = len(same) / draws
    if place is None:
        return Crossing(None, None, lower_below, share, units, draws, seed)
    at = float(scale[place])
    ends = interval_of_draws(at, same, units, confidence) if len(same) > 1 else Interval(-math.inf, math.inf)
    low, high = max(ends.low, float(scale[0])), min(ends.high, float(scale[-1]))
    interval = Interval(1 - 10.0**-low, 1 - 10.0**-high, confidence)
    return Crossing(1 - 10.0**-at, interval, lower_below, share, units, draws, seed)


def _turn(difference: Floats) -> tuple[int | None, int]:
    """Index where the sign turns best (None if nowhere), and the sign of the difference before it."""
    steps = np.nan_to_num(difference)
    run = np.cumsum(steps)
    total = run[-1]
    score = 2 * run - total  # area before less area after, for a turn after each point
    best = int(np.argmax(np.abs(score)))
    if best >= len(steps) - 1 or abs(score[best]) <= abs(total) * (1 + 1e-9) + 1e-12:
        return None, 1 if total >= 0 else -1
    return best + 1, 1 if score[best] > 0 else -1
