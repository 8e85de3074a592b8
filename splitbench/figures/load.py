# SPDX-License-Identifier: Apache-2.0
"""A percentile against concurrency, a line per layout, with the SLO: how much load each layout bears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from splitbench.errors import UserError
from splitbench.figures.curves import (
    METRIC_AXES,
    METRIC_SHORT,
    Drawn,
    Mark,
    about,
    cells_of,
    mark_entries,
    mark_style,
    marks,
    samples_sentence,
)
from splitbench.figures.measured import Layout, Measured, Metric, Sample
from splitbench.figures.sheet import COLUMN_IN, PAGE_IN, Entry, Panel, sheet
from splitbench.figures.spec import FigureSpec
from splitbench.figures.style import NEUTRAL, SLO_COLOUR, layout_strokes, percentile_name, styled
from splitbench.statistics.clusters import clustered_quantile
from splitbench.statistics.quantiles import sorted_quantiles

INVALID: dict[str, Any] = {"linestyle": "none", "marker": "x", "markersize": 4.5, "markeredgewidth": 0.9}


def against_concurrency(measured: Measured, spec: FigureSpec, *, metric: Metric) -> Drawn:
    """The spec's last percentile against concurrency; bars are 95 % intervals, hollow points lack requests.

    TTFTs of different content are drawn as the time to second token instead, which has the same content
    everywhere. Invalid cells are crosses that no line touches.

    Raises:
        UserError: no such workload or layout, or no latencies.
    """
    layouts = measured.layouts(spec.workload, spec.layouts)
    swapped = metric == "ttft_ms" and len({layout.first_from_prefiller for layout in layouts}) > 1
    if swapped:
        metric = "second_token_ms"
    percentile = spec.percentiles[-1]
    found = measured.concurrencies(spec.workload, layouts)
    loads = sorted(set(spec.concurrencies) or set().union(*map(set, found.values())))
    samples = [
        sample
        for layout in layouts
        for load in loads
        for sample in measured.samples(spec.workload, layout, load, metric)
    ]
    rows = [_row(measured, sample, percentile) for sample in samples]
    data = pd.DataFrame(rows)
    if not rows or data["value_ms"].isna().all():
        raise UserError(
            f"no latencies of single requests for {spec.figure} of workload '{spec.workload}'",
            where="figures",
            mend="record them (vllm bench serve --save-detailed) and measure these cells again",
        )
    name, short = percentile_name(percentile), METRIC_SHORT[metric]
    with styled():
        strokes = layout_strokes(layouts)
        title = spec.title or f"{name} {short} against concurrency, workload {spec.workload}"
        width = {"auto": None, "column": COLUMN_IN, "page": PAGE_IN}[spec.width]
        figure, ((ax,),) = sheet(
            [[Panel("", layout_entries(layouts, strokes))]],
            title=title,
            key=_key(data, spec),
            axes_height_in=2.0,
            width_in=width,
        )
        draw_lines(ax, data, layouts, strokes, Shown("value_ms", "low_ms", "high_ms", percentile))
        dress_loads(ax, loads)
        ax.set_ylabel(METRIC_AXES[metric].replace(" (ms)", f", {name} (ms)"))
        _dress_y(ax, data, spec)
    cells, invalid = cells_of(samples)
    caption = f"{name} {short} against concurrency, workload {spec.workload}. {samples_sentence(samples)}"
    if swapped:
        caption += " TTFTs of these layouts differ in content, so the time to second token is shown."
    if metric == "itl_ms":
        caption += " Points are exact quantiles of all ITLs; what supports them is the number of requests."
    caption += " Bars are 95 % intervals over server starts, else runs, else requests."
    return Drawn(figure, spec, data, " ".join(caption.split()), cells, invalid)


@dataclass(frozen=True)
class Shown:
    """Which columns are drawn, and as which percentile's marker (a circle where it is none)."""

    value: str
    low: str
    high: str
    percentile: float = 50.0


def draw_lines(
    ax: Axes,
    data: pd.DataFrame,
    layouts: Sequence[Layout],
    strokes: Mapping[str, dict[str, Any]],
    shown: Shown,
) -> None:
    """A line per layout through its valid points with intervals; invalid ones are crosses that no line touches."""
    for layout in layouts:
        stroke = strokes[layout.name]
        mine = data[(data["layout"] == layout.name) & np.isfinite(data[shown.value])]
        valid = mine[mine["valid"]]
        ax.plot(valid["concurrency"], valid[shown.value], **stroke)
        ranged = valid[np.isfinite(valid[shown.low]) & np.isfinite(valid[shown.high])]
        ax.errorbar(
            ranged["concurrency"],
            ranged[shown.value],
            yerr=[
                (ranged[shown.value] - ranged[shown.low]).clip(lower=0),
                (ranged[shown.high] - ranged[shown.value]).clip(lower=0),
            ],
            linestyle="none",
            ecolor=stroke["color"],
            elinewidth=0.8,
            capsize=2,
        )
        for row in valid.to_dict("records"):
            style = mark_style(shown.percentile, stroke["color"], bool(row["supported"]))
            ax.plot([row["concurrency"]], [row[shown.value]], zorder=4, **style)
        bad = mine[~mine["valid"]]
        ax.plot(bad["concurrency"], bad[shown.value], color=stroke["color"], zorder=5, **INVALID)


def dress_loads(ax: Axes, loads: Sequence[int]) -> None:
    """The axis of concurrencies: one tick each, doubled loads at equal distances."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(list(loads)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xlim(loads[0] / 1.2, loads[-1] * 1.2)
    ax.set_xlabel("Concurrency (requests in flight)", labelpad=2)


def layout_entries(layouts: Sequence[Layout], strokes: Mapping[str, dict[str, Any]]) -> list[Entry]:
    """Legend of lines by layout."""
    return [
        (Line2D([], [], marker="o", markersize=3, **strokes[layout.name]), layout.words) for layout in layouts
    ]


def _row(measured: Measured, sample: Sample, percentile: float) -> dict[str, object]:
    found = marks(sample, [percentile])
    interval = None
    if found and found[0].supported and sample.valid:
        interval = clustered_quantile(measured.units(sample.cells, sample.metric), percentile / 100).interval
    each = [float(sorted_quantiles(part, [percentile / 100])[0]) for part in sample.parts if part.size]
    return {
        **about(sample),
        "repeats": len(sample.parts),
        "percentile": percentile,
        "value_ms": found[0].value_ms if found else float("nan"),
        "low_ms": interval.low if interval else float("nan"),
        "high_ms": interval.high if interval else float("nan"),
        "lowest_repeat_ms": min(each, default=float("nan")),
        "highest_repeat_ms": max(each, default=float("nan")),
        "supported": bool(found and found[0].supported and sample.valid),
        "needs": found[0].needs if found else 0,
    }


def _dress_y(ax: Axes, data: pd.DataFrame, spec: FigureSpec) -> None:
    if spec.slo_ms is not None:
        ax.axhline(spec.slo_ms, color=SLO_COLOUR, linewidth=0.8, zorder=1.2)
    ends = data[["value_ms", "low_ms", "high_ms"]].to_numpy(dtype=np.float64).ravel()
    values = [float(end) for end in ends[np.isfinite(ends)]]
    values += [spec.slo_ms] if spec.slo_ms is not None else []
    low, high = spec.window.x_min_ms, spec.window.x_max_ms
    smallest, largest = min(values), max(values)
    if spec.window.x_scale == "log" or (spec.window.x_scale == "auto" and largest > 8 * smallest > 0):
        ax.set_yscale("log")
        decades = largest / smallest
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 300 else (1.0,), numticks=15))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_ylim(low or smallest / 1.25, high or largest * 1.25)
    else:
        ax.set_ylim(low or 0, high or largest * 1.08)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _key(data: pd.DataFrame, spec: FigureSpec) -> list[Entry]:
    valid = data[data["valid"] & data["value_ms"].notna()]
    entries = mark_entries(
        [
            Mark(float(row["percentile"]), float(row["value_ms"]), bool(row["supported"]), int(row["needs"]))
            for row in valid.to_dict("records")
        ]
    )
    if (np.isfinite(valid["low_ms"]) & np.isfinite(valid["high_ms"])).any():
        entries.append(
            (Line2D([], [], color=NEUTRAL, linewidth=0.8, marker="|", markersize=4), "95 % interval")
        )
    if (~data["valid"]).any():
        entries.append((Line2D([], [], color=NEUTRAL, **INVALID), "invalid cell: no result"))
    if spec.slo_ms is not None:
        entries.append((Line2D([], [], color=SLO_COLOUR, linewidth=0.8), f"SLO {spec.slo_ms:g} ms"))
    return entries
