# SPDX-License-Identifier: Apache-2.0
"""Axes for tails: the share of values above x on a logarithmic axis, so that P99 and P99.9 have room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from splitbench.figures.curves import dress_x, extent_of, slo_line
from splitbench.figures.ecdf import Extent
from splitbench.figures.measured import Sample
from splitbench.figures.spec import FigureSpec, Window

_TICKS = (1.0, 0.5, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6)


def tail_extent(samples: Sequence[Sample], window: Window) -> Extent:
    """As for a CDF, down to the smallest share that the largest sample can show."""
    extent = extent_of(samples, window)
    if window.y_max < 1:
        return extent
    most = max((sample.values.size for sample in samples), default=1)
    return replace(extent, y_max=1 - 0.7 / most)


def dress_tail(ax: Axes, extent: Extent, spec: FigureSpec, *, x_label: str, y_label: str) -> None:
    """Limits, scales, ticks and labels of survival axes; ticks carry the percentile that they stand for."""
    dress_x(ax, extent, x_label)
    ax.set_yscale("log")
    ax.set_ylim(1 - extent.y_max, 1 - extent.y_min if extent.y_min else 1.15)
    ax.yaxis.set_major_locator(FixedLocator(_TICKS))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    ax.set_ylabel(y_label)
    slo_line(ax, spec)
