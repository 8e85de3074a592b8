# SPDX-License-Identifier: Apache-2.0
"""Break-even: how much PD changes a latency against its budget-matched reference, and where that passes zero."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from splitbench.errors import UserError
from splitbench.figures.curves import METRIC_SHORT, Drawn, cells_of, mark_style, samples_sentence
from splitbench.figures.load import dress_loads
from splitbench.figures.measured import Layout, Measured, Metric
from splitbench.figures.nothing import nothing
from splitbench.figures.sheet import COLUMN_IN, PAGE_IN, Entry, Panel, sheet
from splitbench.figures.spec import FigureSpec
from splitbench.figures.style import NEUTRAL, layout_strokes, percentile_name, styled
from splitbench.statistics.compare import Compared, compared, statistic_of
from splitbench.statistics.verdict import break_even_of, pairs, same_content

_METRICS: tuple[Metric, ...] = ("itl_ms", "ttft_ms")


def break_even_lines(measured: Measured, spec: FigureSpec) -> Drawn:
    """Change of ITL and TTFT (or time to second token) against concurrency: a line per budget-matched pair.

    Raises:
        UserError: no budget holds a PD layout and another one.
    """
    layouts = {layout.name: layout for layout in measured.layouts(spec.workload, spec.layouts)}
    pools = measured.pools(spec.workload)
    arms = [
        pair for pair in pairs(pools, spec.workload) if pair[0].name in layouts and pair[1].name in layouts
    ]
    if not arms:
        raise UserError(
            f"no PD layout of workload '{spec.workload}' has another layout of its budget beside it",
            where="figures: break_even",
            mend="leave this figure out",
        )
    statistic = statistic_of(spec.percentiles[-1])
    lines: list[dict[str, Any]] = []
    places: list[dict[str, Any]] = []
    panels: list[list[Metric]] = [[] for _ in _METRICS]
    for panel, metric in enumerate(_METRICS):
        for reference, layout in arms:
            same = same_content(metric, reference, layout)
            loads = sorted(
                set(pools.loads(spec.workload, reference.name)) & set(pools.loads(spec.workload, layout.name))
            )
            wanted = [load for load in loads if not spec.concurrencies or load in spec.concurrencies]
            line: list[tuple[float, Compared]] = []
            for load in wanted:
                one = compared(pools, spec.workload, reference.name, layout.name, load, same, statistic)
                if one is not None:
                    line.append((load, one))
                    lines.append(_row(panel, layouts[layout.name], reference.name, one))
            panels[panel].append(same)  # type: ignore[arg-type]
            found = {"panel": panel, "reference": reference.name, "layout": layout.name, "metric": same}
            places.append(found | break_even_of(line))
    data = pd.DataFrame(lines)
    if data.empty or not np.isfinite(data["change"]).any():
        rows = measured.cells[measured.cells["workload"] == spec.workload]
        return nothing(
            spec,
            f"What PD changes, by concurrency, workload {spec.workload}",
            f"No load of workload {spec.workload} has valid cells of both layouts of a pair.",
            tuple(sorted(rows["cell_id"])),
            tuple(sorted(rows.loc[rows["verdict"] == "invalid", "cell_id"])),
        )
    return _drawn(measured, spec, data, places, [layouts[arm.name] for _, arm in arms], panels)


def _row(panel: int, layout: Layout, reference: str, one: Compared) -> dict[str, Any]:
    return {
        "panel": panel,
        "metric": one.metric,
        "layout": layout.name,
        "reference": reference,
        "budget": layout.occupies,
        "concurrency": one.load,
        "percentile": one.statistic,
        "reference_ms": one.reference_ms,
        "layout_ms": one.layout_ms,
        "change": one.change,
        "low": one.low if one.supported else math.nan,
        "high": one.high if one.supported else math.nan,
        "supported": one.supported,
        "requests": one.gate.n,
        "needs": one.gate.needs,
        "level": one.level,
        "units": one.units,
    }


def _drawn(
    measured: Measured,
    spec: FigureSpec,
    data: pd.DataFrame,
    places: list[dict[str, Any]],
    layouts: list[Layout],
    panels: list[list[Metric]],
) -> Drawn:
    name = percentile_name(spec.percentiles[-1])
    with styled():
        strokes = layout_strokes(layouts)
        titles = [
            f"{name} {' / '.join(dict.fromkeys(METRIC_SHORT[metric] for metric in panel))}"
            for panel in panels
        ]
        grid = [[Panel(title)] for title in titles]
        grid[-1][0].entries = [
            (Line2D([], [], **strokes[row["layout"]]), f"{row['layout']} against {row['reference']}")
            for row in data.drop_duplicates(["layout", "reference"]).to_dict("records")
        ]
        figure, axes = sheet(
            grid,
            title=spec.title or f"What PD changes, by concurrency, workload {spec.workload}",
            key=_key(data, places, spec),
            axes_height_in=1.5,
            shared=False,
            width_in={"auto": None, "column": COLUMN_IN, "page": PAGE_IN}[spec.width],
        )
        loads = sorted({int(load) for load in data["concurrency"]})
        for panel, (ax,) in enumerate(axes):
            mine = data[data["panel"] == panel]
            for pair, line in mine.groupby(["layout", "reference"], sort=False):
                _line(ax, line, strokes[pair[0]])
            for place in places:
                if place["panel"] == panel and place["at"] is not None:
                    _place(ax, place, strokes[place["layout"]]["color"])
            _dress(ax, mine, loads, spec)
    samples = [
        sample
        for layout in measured.layouts(spec.workload)
        if layout.name in set(data["layout"]) | set(data["reference"])
        for load in loads
        for sample in measured.samples(spec.workload, layout, load, "itl_ms")
    ]
    cells, invalid = cells_of(samples)
    caption = (
        f"Relative change of {name} from the reference to PD at equal budget, workload {spec.workload}; below zero "
        f"PD is better. {' '.join(_sentence(place) for place in places)} {samples_sentence(samples)}"
    )
    return Drawn(figure, spec, data, " ".join(caption.split()), cells, invalid)


def _line(ax: Axes, line: pd.DataFrame, stroke: dict[str, Any]) -> None:
    ax.plot(line["concurrency"], 100 * line["change"], **stroke)
    for row in line.to_dict("records"):
        ax.plot(
            [row["concurrency"]],
            [100 * row["change"]],
            zorder=4,
            **mark_style(50, stroke["color"], bool(row["supported"])),
        )
    ranged = line[np.isfinite(line["low"]) & np.isfinite(line["high"])]
    if len(ranged):
        ax.vlines(
            ranged["concurrency"],
            100 * ranged["low"],
            100 * ranged["high"],
            color=stroke["color"],
            linewidth=0.8,
        )


def _place(ax: Axes, place: dict[str, Any], colour: str) -> None:
    ax.plot([place["at"]], [0], marker="D", markersize=4.5, color=colour, zorder=5, linestyle="none")
    if place["low"] is not None and place["high"] is not None and place["supported"]:
        ax.plot([place["low"], place["high"]], [0, 0], color=colour, linewidth=2.2, alpha=0.5, zorder=3)


def _dress(ax: Axes, mine: pd.DataFrame, loads: list[int], spec: FigureSpec) -> None:
    ax.axhline(0, color=NEUTRAL, linewidth=0.8, zorder=1)
    if spec.margin_percent is not None:
        ax.axhspan(
            -spec.margin_percent, spec.margin_percent, color=NEUTRAL, alpha=0.12, linewidth=0, zorder=0.5
        )
    dress_loads(ax, loads)
    values = 100 * mine["change"].to_numpy(dtype=np.float64)
    values = values[np.isfinite(values)]
    low, high = min(-10.0, float(values.min(initial=0))), max(10.0, float(values.max(initial=0)))
    pad = 0.12 * (high - low)
    ax.set_ylim(max(low - pad, -108), high + pad)
    ax.yaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+,.10g}%" if value else "0"))
    ax.set_ylabel("Change by PD")


def _key(data: pd.DataFrame, places: list[dict[str, Any]], spec: FigureSpec) -> list[Entry]:
    entries: list[Entry] = []
    if any(place["at"] is not None for place in places):
        entries.append(
            (Line2D([], [], marker="D", markersize=4.5, color=NEUTRAL, linestyle="none"), "break-even")
        )
    if (np.isfinite(data["low"]) & np.isfinite(data["high"])).any():
        entries.append(
            (Line2D([], [], color=NEUTRAL, linewidth=0.8, marker="|", markersize=4), "95 % interval")
        )
    if spec.margin_percent is not None:
        entries.append(
            (Patch(facecolor=NEUTRAL, alpha=0.2, linewidth=0), f"margin of {spec.margin_percent:g} %")
        )
    lacking = data[~data["supported"].astype(bool)]
    if len(lacking):
        needs = int(lacking["needs"].max())
        entries.append(
            (Line2D([], [], **mark_style(50, NEUTRAL, False)), f"hollow: too few requests (needs {needs:,})")
        )
    return entries


def _sentence(place: dict[str, Any]) -> str:
    what = f"{METRIC_SHORT[place['metric']]}, {place['layout']} against {place['reference']}:"
    if not place["places"]:
        return f"{what} no load with valid cells of both."
    lower = "PD" if place["better_below"] == "layout" else place["reference"]
    if place["at"] is None:
        return f"{what} {lower} is better at every measured load."
    ends = ""
    if place["low"] is not None and place["high"] is not None and place["supported"]:
        ends = f" [{place['low']:.3g} to {place['high']:.3g}]"
    reading = "" if place["supported"] else " (a reading of too few requests)"
    return f"{what} {lower} is better below c={place['at']:.3g}{ends}{reading}."
