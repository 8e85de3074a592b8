# SPDX-License-Identifier: Apache-2.0
"""Empirical distributions of millions of samples, thinned for drawing without moving any of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# A page-wide panel at 600 dpi has about 3,900 pixel columns, a column-wide one 1,800: two bins are never in
# one pixel gap that a reader could see.
BINS = 4096
TAIL = 1000


@dataclass(frozen=True)
class Extent:
    """The drawn rectangle: `x` in ms, `y` as cumulative shares; `log` spaces x by ratios."""

    x_min: float
    x_max: float
    y_min: float = 0.0
    y_max: float = 1.0
    log: bool = False

    def edges(self, bins: int) -> Floats:
        """`bins + 1` edges, evenly spaced on paper."""
        space = np.geomspace if self.log else np.linspace
        return np.asarray(space(self.x_min, self.x_max, bins + 1), dtype=np.float64)


def share_at(ordered: Floats, x: Floats) -> Floats:
    """Share of the samples at or below each `x`: the exact empirical distribution."""
    return np.searchsorted(ordered, x, side="right") / ordered.size


def drawn_steps(
    ordered: Floats, extent: Extent, *, bins: int = BINS, tail: int = TAIL
) -> tuple[Floats, Floats]:
    """Corners of the empirical distribution inside `extent`: x in ms ascending, and the exact share at each.

    Draw them as steps (the share holds from its x to the next). The first and the last sample of every x bin
    are kept, so between bins the drawn curve equals the exact one, and within a bin it is off by less than
    the bin's width, which is less than a pixel. The `tail` largest samples inside the drawn rectangle are all
    kept, as is the nearest sample on either side of the rectangle, so that the curve runs out of it.

    Args:
        ordered: samples in ms, ascending, at least one.
    """
    n = ordered.size
    index = np.searchsorted(ordered, extent.edges(bins), side="left")
    index[-1] = np.searchsorted(ordered, extent.x_max, side="right")
    filled = index[1:] > index[:-1]
    # The top of the rectangle: the last sample that it shows, by x or by share, whichever ends first.
    top = min(int(index[-1]), int(np.ceil(extent.y_max * n)))
    keep = np.concatenate(
        [
            index[:-1][filled],
            index[1:][filled] - 1,
            np.arange(max(int(index[0]), top - tail), top),
            np.array([max(int(index[0]) - 1, 0), min(int(index[-1]), n - 1)]),
        ]
    )
    x = np.unique(ordered[keep])
    return x, share_at(ordered, x)
