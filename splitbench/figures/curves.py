# SPDX-License-Identifier: Apache-2.0
"""One sample's distribution on one set of axes: curve, repeats, percentiles, and how invalid ones look."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withTickedStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from splitbench.figures.ecdf import Extent, drawn_steps, share_at
from splitbench.figures.measured import Metric, Sample
from splitbench.figures.sheet import Entry
from splitbench.figures.spec import FigureSpec, Window
from splitbench.figures.style import NEUTRAL, SLO_COLOUR, percentile_marker, percentile_name
from splitbench.statistics.quantiles import sample_gate, sorted_quantiles

METRIC_AXES: dict[Metric, str] = {
    "itl_ms": "Inter-token latency (ms)",
    "ttft_ms": "Time to first token (ms)",
    "second_token_ms": "Time to second token (ms)",
    "e2e_ms": "End-to-end latency (ms)",
    "handoff_gap_ms": "First ITL less the later ones' median (ms)",
}
METRIC_SHORT: dict[Metric, str] = {
    "itl_ms": "ITL",
    "ttft_ms": "TTFT",
    "second_token_ms": "time to second token",
    "e2e_ms": "end-to-end latency",
    "handoff_gap_ms": "hand-off gap",
}

# How much of a linear axis may be empty before a logarithmic one reads better: largest value over smallest
# median.
_LOG_FROM = 12.0


@dataclass(frozen=True)
class Drawn:
    """A figure with what belongs to it.

    Args:
        figure: matplotlib's.
        spec: what it was drawn from.
        data: every drawn corner and marker, as written into the CSV.
        caption: one to five sentences, with the numbers of samples and what is left out.
        cells: all cells in it, invalid ones too, sorted.
        invalid: the invalid ones.
    """

    figure: Figure
    spec: FigureSpec
    data: pd.DataFrame
    caption: str
    cells: tuple[str, ...]
    invalid: tuple[str, ...]


@dataclass(frozen=True)
class Mark:
    """A percentile of a sample; where `supported` is false the sample is too small to claim it."""

    percentile: float
    value_ms: float
    supported: bool
    needs: int


def marks(sample: Sample, percentiles: Iterable[float]) -> list[Mark]:
    """Percentiles of a sample; requests, not tokens, are what supports them."""
    if not sample.values.size:
        return []
    percentiles = list(percentiles)
    levels = [percentile / 100 for percentile in percentiles]
    gates = [sample_gate(level, sample.requests) for level in levels]
    return [
        Mark(percentile, float(value), gate.supported, gate.needs)
        for percentile, value, gate in zip(
            percentiles, sorted_quantiles(sample.values, levels), gates, strict=True
        )
    ]


def extent_of(samples: Sequence[Sample], window: Window) -> Extent:
    """The drawn rectangle: as configured, otherwise wide enough for every sample of every line.

    On a logarithmic axis the lowest half percent of a line may lie left of it: near-zero gaps of a client
    that saw two tokens at once would otherwise take half of the paper. Captions say how much is left out.
    """
    filled = [sample.values for sample in samples if sample.values.size]
    if not filled:
        return Extent(window.x_min_ms or 0.1, window.x_max_ms or 1.0, window.y_min, window.y_max)
    largest = max(float(values[-1]) for values in filled)
    log = window.x_scale == "log"
    if window.x_scale == "auto":
        smallest = min(float(values[values.size // 2]) for values in filled)
        log = min(largest, window.x_max_ms or math.inf) > _LOG_FROM * smallest > 0 and window.x_min_ms != 0
    x_max = window.x_max_ms or largest * (1.12 if log else 1.04) or 1.0
    if log:
        low = min(float(values[values.size // 200]) for values in filled)
        x_min = window.x_min_ms or max(low * 0.9, x_max / 1e5)
    else:
        x_min = window.x_min_ms or min(0.0, *(float(values[0]) for values in filled))
    if x_min >= x_max:
        x_max = x_min * 1.1 + 1e-3
    return Extent(x_min, x_max, window.y_min, window.y_max, log)


def draw_curve(
    ax: Axes, sample: Sample, extent: Extent, stroke: dict[str, Any], spec: FigureSpec, *, survival: bool
) -> None:
    """Draw a sample: exact steps, a band between the repeats where there are several, percentiles as markers.

    An invalid sample is drawn thin, with ticks along it, and without percentiles.
    """
    if not sample.values.size:
        return
    x, share = drawn_steps(sample.values, extent)
    # A step up from the axis at the smallest sample.
    x, y = (
        np.concatenate([x[:1], x]),
        np.concatenate([[0.0 if x[0] == sample.values[0] else share[0]], share]),
    )
    if survival:
        # Nothing lies above the largest sample; a logarithmic axis has no zero, so the curve drops out of it
        # there.
        y = np.maximum(1 - y, 1e-12)
    if not sample.valid:
        ax.plot(x, y, drawstyle="steps-post", **invalid_stroke(stroke))
        return
    if len(sample.parts) > 1:
        grid = np.unique(np.concatenate([drawn_steps(part, extent)[0] for part in sample.parts if part.size]))
        shares = np.stack([share_at(part, grid) for part in sample.parts if part.size])
        low, high = shares.min(axis=0), shares.max(axis=0)
        if survival:
            low, high = np.maximum(1 - high, 1e-12), np.maximum(1 - low, 1e-12)
        ax.fill_between(
            grid, low, high, step="post", color=stroke["color"], alpha=0.18, linewidth=0, zorder=1.5
        )
    ax.plot(x, y, drawstyle="steps-post", **stroke)
    for mark in marks(sample, spec.percentiles):
        height = 1 - mark.percentile / 100 if survival else mark.percentile / 100
        ax.plot(
            [mark.value_ms],
            [height],
            zorder=4,
            **mark_style(mark.percentile, stroke["color"], mark.supported),
        )


def invalid_stroke(stroke: dict[str, Any]) -> dict[str, Any]:
    """A line that nobody takes for a result: thin and ticked along its length, as hatching is for areas."""
    return {
        **stroke,
        "linewidth": 0.6,
        "path_effects": [withTickedStroke(spacing=3.5, angle=60, length=0.55, linewidth=0.6)],
    }


def mark_style(percentile: float, colour: str, supported: bool) -> dict[str, Any]:
    """Filled where the sample supports the percentile, hollow where it is too small to claim it."""
    return {
        "linestyle": "none",
        "marker": percentile_marker(percentile),
        "markersize": 4.0,
        "markeredgewidth": 0.8,
        "markeredgecolor": colour,
        "markerfacecolor": colour if supported else "white",
    }


def legend_entry(sample: Sample, name: str, stroke: dict[str, Any]) -> Entry:
    """Handle and label of a curve; the label carries n, and for an invalid one the checks that failed."""
    count = f"{sample.requests:,} req"
    if sample.metric == "itl_ms":
        count += f", {sample.values.size:,} ITLs"
    if sample.valid:
        return Line2D([], [], **stroke), f"{name}: {count}"
    return Line2D([], [], **invalid_stroke(stroke)), f"{name}: INVALID ({', '.join(sample.reasons)}), {count}"


def key_entries(samples: Sequence[Sample], extent: Extent, spec: FigureSpec) -> list[Entry]:
    """What markers, hollow markers, bands, ticked lines and the SLO line mean; only what the figure has."""
    entries: list[Entry] = []
    found = [
        mark
        for sample in samples
        if sample.valid
        for mark in marks(sample, spec.percentiles)
        if extent.y_min <= mark.percentile / 100 <= extent.y_max
        and extent.x_min <= mark.value_ms <= extent.x_max
    ]
    entries += mark_entries(found)
    if any(sample.valid and len(sample.parts) > 1 for sample in samples):
        entries.append((Patch(facecolor=NEUTRAL, alpha=0.25, linewidth=0), "range of repeats"))
    if any(not sample.valid for sample in samples):
        entries.append((Line2D([], [], **invalid_stroke({"color": NEUTRAL})), "invalid cell: no result"))
    if spec.slo_ms is not None:
        entries.append((Line2D([], [], color=SLO_COLOUR, linewidth=0.8), f"SLO {spec.slo_ms:g} ms"))
    return entries


def mark_entries(found: Sequence[Mark]) -> list[Entry]:
    """One entry per percentile, and one for all hollow markers with the requests that they lack."""
    percentiles = sorted({mark.percentile for mark in found})
    entries: list[Entry] = [
        (Line2D([], [], **mark_style(percentile, NEUTRAL, True)), percentile_name(percentile))
        for percentile in percentiles
    ]
    lacking = sorted({(mark.percentile, mark.needs) for mark in found if not mark.supported})
    if lacking:
        needs = ", ".join(f"{percentile_name(percentile)} needs {count:,}" for percentile, count in lacking)
        entries.append(
            (
                Line2D([], [], **mark_style(lacking[-1][0], NEUTRAL, False)),
                f"hollow: too few requests ({needs})",
            )
        )
    return entries


def dress(ax: Axes, extent: Extent, spec: FigureSpec, *, x_label: str, y_label: str) -> None:
    """Limits, scales, ticks, labels and the SLO line of distribution axes with a linear share axis."""
    dress_x(ax, extent, x_label)
    pad = 0.02 * (extent.y_max - extent.y_min)
    ax.set_ylim(extent.y_min - pad, extent.y_max + pad)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.6g}%"))
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.set_ylabel(y_label)
    slo_line(ax, spec)


def slo_line(ax: Axes, spec: FigureSpec) -> None:
    if spec.slo_ms is not None:
        ax.axvline(spec.slo_ms, color=SLO_COLOUR, linewidth=0.8, zorder=1.2)


def dress_x(ax: Axes, extent: Extent, label: str) -> None:
    """The latency axis: plain numbers, also on a logarithmic one."""
    if extent.log:
        ax.set_xscale("log")
        decades = math.log10(extent.x_max / extent.x_min)
        # At most about eight labels on a column's width.
        subs = (1.0, 2.0, 5.0) if decades < 2.6 else (1.0, 3.0) if decades < 4 else (1.0,)
        ax.xaxis.set_major_locator(LogLocator(subs=subs, numticks=15))
        ax.xaxis.set_minor_locator(LogLocator(subs=tuple(float(i) for i in range(2, 10)), numticks=15))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(7))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    ax.set_xlim(extent.x_min, extent.x_max)
    ax.set_xlabel(label, labelpad=2)


def about(sample: Sample) -> dict[str, Any]:
    """Columns that every figure's data begins with."""
    return {
        "metric": sample.metric,
        "layout": sample.layout.name,
        "kind": sample.layout.kind,
        "budget": sample.layout.occupies,
        "concurrency": sample.concurrency,
        "valid": sample.valid,
        "requests": sample.requests,
        "samples": sample.values.size,
    }


def data_frame(samples: Sequence[Sample], extent: Extent, spec: FigureSpec) -> pd.DataFrame:
    """Every drawn corner and percentile: one row each, in drawing order."""
    frames: list[pd.DataFrame] = []
    for sample in samples:
        columns = about(sample)
        if not sample.values.size:
            frames.append(
                pd.DataFrame(
                    [{**columns, "what": "nothing", "x_ms": np.nan, "share": np.nan, "supported": False}]
                )
            )
            continue
        x, share = drawn_steps(sample.values, extent)
        frames.append(
            pd.DataFrame({**columns, "what": "curve", "x_ms": x, "share": share, "supported": True})
        )
        if sample.valid:
            found = marks(sample, spec.percentiles)
            rows = {
                "what": [percentile_name(mark.percentile) for mark in found],
                "x_ms": [mark.value_ms for mark in found],
                "share": [mark.percentile / 100 for mark in found],
                "supported": [mark.supported for mark in found],
            }
            frames.append(pd.DataFrame({**columns, **rows}))
    return pd.concat(frames, ignore_index=True)


def left_out(samples: Sequence[Sample], extent: Extent) -> str:
    """A sentence on what of the valid curves lies beyond the x axis; empty if nothing does."""
    beyond: list[tuple[float, str]] = []
    below = 0.0
    for sample in samples:
        if not (sample.valid and sample.values.size):
            continue
        above = 1 - float(share_at(sample.values, np.array([extent.x_max]))[0])
        beyond.append((above, f"{sample.layout.name} at c={sample.concurrency}"))
        below = max(below, float(np.searchsorted(sample.values, extent.x_min)) / sample.values.size)
    sentences = []
    most = max(beyond, default=(0.0, ""))
    if most[0] > 0:
        sentences.append(
            f"The x axis ends at {extent.x_max:.4g} ms: "
            f"up to {_share(most[0])} of a line ({most[1]}) lies beyond."
        )
    if below > 0:
        sentences.append(f"Up to {_share(below)} of a line lies below {extent.x_min:.3g} ms.")
    return " ".join(sentences)


def _share(value: float) -> str:
    return f"{100 * value:.2g} %" if value >= 1e-5 else "less than 0.001 %"


def cells_of(samples: Sequence[Sample]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All cells, and the invalid ones, sorted."""
    return (
        tuple(sorted({cell for sample in samples for cell in sample.cells})),
        tuple(sorted({cell for sample in samples if not sample.valid for cell in sample.cells})),
    )


def samples_sentence(samples: Sequence[Sample]) -> str:
    """n and validity, for the caption."""
    valid = [sample for sample in samples if sample.valid]
    counts = sorted({sample.requests for sample in valid})
    parts: list[str] = []
    if counts:
        span = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        text = f"n = {span} successful requests per line"
        if valid[0].metric == "itl_ms":
            sizes = sorted({sample.values.size for sample in valid})
            text += f" ({sizes[0]:,}" + (f" to {sizes[-1]:,}" if len(sizes) > 1 else "") + " ITLs)"
        repeats = sorted({len(sample.parts) for sample in valid})
        cells = f"{repeats[0]}" if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
        text += f", from {cells} cell{'s' if repeats[-1] > 1 else ''} each"
        parts.append(text + ".")
        if repeats == [1]:
            parts.append("One repeat: no interval between repeats can be given.")
    invalid = [sample for sample in samples if not sample.valid]
    if invalid:
        named = "; ".join(
            f"{sample.layout.name} at c={sample.concurrency} ({', '.join(sample.reasons)})"
            for sample in invalid
        )
        parts.append(f"Invalid, shown ticked or not at all, and no result: {named}.")
    return " ".join(parts)
