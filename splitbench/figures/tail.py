# SPDX-License-Identifier: Apache-2.0
"""Axes for tails: the share of values above x on a logarithmic axis, so that P99 and P99.9 have room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from splitbench.figures.curves import dress_x, extent_of, slo_line
from splitbench.figures.ecdf import Extent
from splitbench.figures.measured import Sample
from splitbench.figures.sheet import Entry
from splitbench.figures.spec import FigureSpec, Window

_HATCH: dict[str, Any] = {"facecolor": "none", "edgecolor": "#c4c4c4", "hatch": "//////", "linewidth": 0}
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


def supported_share(requests: int, confidence: float = 0.95) -> float:
    """Smallest share above x that so many independent samples support: the sample gate, turned round."""
    return 1 - float(((1 - confidence) / 2) ** (1 / requests)) if requests else 1.0


def hatch_unsupported(ax: Axes, samples: Sequence[Sample]) -> None:
    """Hatch the part of the axes that not even the panel's largest valid sample supports."""
    most = max((sample.requests for sample in samples if sample.valid), default=0)
    low, high = ax.get_ylim()
    top = min(supported_share(most), high)
    if top > low:
        ax.axhspan(low, top, zorder=0.5, **_HATCH)


def unsupported_entry() -> Entry:
    """What the hatching means."""
    return Patch(**_HATCH), "too few requests, even for the largest sample"
