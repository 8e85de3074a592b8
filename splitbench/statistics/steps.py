# SPDX-License-Identifier: Apache-2.0
"""Is a distribution stair-shaped? Counts the groups that its values fall into.

The density is smoothed by the width that predicts each value best from the others (leave-one-out likelihood), so
narrow groups stay apart and a smooth distribution stays one. A group is a peak at least twice as high as the higher
of the valleys beside it, and that stands out by a seventh of the highest peak. Draws of the same requests again
give the interval of the count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splitbench.statistics.bootstrap import SEED
from splitbench.statistics.quantiles import Floats

_MOST = 800  # values looked at: the likelihood takes their square
_GRID = 1024
_DRAWS = 199
_OF_ITSELF, _OF_HIGHEST = 0.5, 1 / 7


@dataclass(frozen=True)
class Steps:
    """Groups of values: their number, its 95 % interval, and how many values were looked at."""

    count: int
    low: int
    high: int
    n: int


def count_steps(values: Floats, seed: int = SEED) -> Steps:
    """Count the steps of a distribution function.

    Args:
        values: independent values, at least one.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    chosen = values if len(values) <= _MOST else rng.choice(values, _MOST, replace=False)
    spread = float(np.ptp(chosen))
    if len(chosen) < 8 or spread <= 0:
        return Steps(1, 1, 1, len(chosen))
    width = _width(chosen, spread)
    grid = np.linspace(chosen.min() - 3 * width, chosen.max() + 3 * width, _GRID)
    cell = (grid[-1] - grid[0]) / (_GRID - 1)
    places = np.rint((chosen - grid[0]) / cell).astype(np.int64)
    reach = max(1, int(np.ceil(4 * width / cell)))
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) * cell / width) ** 2)
    found = _peaks(np.bincount(places, minlength=_GRID), kernel)
    draws = [
        _peaks(np.bincount(rng.choice(places, len(places)), minlength=_GRID), kernel) for _ in range(_DRAWS)
    ]
    low, high = np.quantile(draws, [0.025, 0.975], method="nearest")
    return Steps(found, min(found, int(low)), max(found, int(high)), len(chosen))


def _width(values: Floats, spread: float) -> float:
    """The kernel width with the highest leave-one-out likelihood."""
    squares = (values[:, None] - values[None, :]) ** 2
    np.fill_diagonal(squares, np.inf)
    widths = spread * np.geomspace(0.004, 0.5, 28)
    scores = []
    for width in widths:
        density = np.exp(-0.5 * squares / width**2).sum(axis=1) / width
        scores.append(float(np.log(np.maximum(density, 1e-300)).sum()))
    return float(widths[int(np.argmax(scores))])


def _peaks(counts: np.ndarray, kernel: Floats) -> int:
    from scipy.signal import find_peaks  # takes a second to load

    density = np.concatenate([[0.0], np.convolve(counts, kernel, mode="same"), [0.0]])
    peaks, found = find_peaks(density, prominence=_OF_HIGHEST * density.max())
    return max(1, int(np.count_nonzero(found["prominences"] >= _OF_ITSELF * density[peaks])))
