# SPDX-License-Identifier: Apache-2.0
"""What a budget buys: goodput and cost at the SLO against concurrency, and throughput against interactivity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from splitbench.errors import UserError
from splitbench.figures.curves import Drawn, about, cells_of, mark_style, samples_sentence
from splitbench.figures.load import INVALID, Shown, draw_lines, dress_loads, layout_entries
from splitbench.figures.measured import Layout, Measured, Sample
from splitbench.figures.sheet import COLUMN_IN, PAGE_IN, Entry, Panel, sheet
from splitbench.figures.spec import FigureSpec, Limits
from splitbench.figures.style import NEUTRAL, layout_strokes, styled
from splitbench.statistics.capacity import Rate, Run, cost_per_million, goodput, token_goodput
from splitbench.statistics.clusters import clustered_quantile
from splitbench.statistics.quantiles import sample_gate
from splitbench.statistics.slo import Slo, attained

What = Literal["goodput", "cost"]
_SLO_COLUMNS = ("ok", "output_tokens", "ttft_ms", "itl_p99_ms")


@dataclass(frozen=True)
class _Place:
    """One layout at one load with its runs."""

    sample: Sample
    runs: tuple[Run, ...]
    budget: int
    asked: int


def money(measured: Measured, spec: FigureSpec, *, what: What) -> Drawn:
    """Goodput per accelerator, or the cost of a million output tokens, against concurrency: a line per layout.

    Raises:
        UserError: no such workload or layout, or the cells state no durations.
    """
    layouts, loads, places = _places(measured, spec, spec.limits or Limits())
    rows = [_money_row(place, spec, what) for place in places]
    data = pd.DataFrame(rows)
    label, unit = _labels(layouts, spec, what)
    with styled():
        strokes = layout_strokes(layouts)
        title = spec.title or f"{label} against concurrency, workload {spec.workload}"
        figure, ((ax,),) = sheet(
            [[Panel("", layout_entries(layouts, strokes))]],
            title=title,
            key=_key(data),
            axes_height_in=2.0,
            width_in={"auto": None, "column": COLUMN_IN, "page": PAGE_IN}[spec.width],
        )
        draw_lines(ax, data, layouts, strokes, Shown("value", "low", "high"))
        dress_loads(ax, loads)
        ax.set_ylabel(unit)
        _dress_value(ax, data, spec)
    samples = [place.sample for place in places]
    cells, invalid = cells_of(samples)
    within = spec.limits.words if spec.limits else ""
    kept = (
        f"requests that keep the SLO ({within})" if within else "all answered requests, since no SLO is set"
    )
    caption = (
        f"{label} against concurrency, workload {spec.workload}; it counts {kept}, and every accelerator of "
        f"the layout. {samples_sentence(samples)}"
    )
    nothing = [row for row in rows if row["valid"] and not math.isfinite(float(str(row["value"])))]
    if nothing:
        caption += f" {len(nothing)} points have no finite cost, since no request kept the SLO."
    caption += " Bars are 95 % intervals over server starts, else runs; one of these gives none."
    return Drawn(figure, spec, data, " ".join(caption.split()), cells, invalid)


def throughput_interactivity(measured: Measured, spec: FigureSpec) -> Drawn:
    """Output tokens per second and accelerator against tokens per second of one user; a line per layout.

    Points are concurrencies. The front is made of valid points that no other one beats in both.

    Raises:
        UserError: as `money`.
    """
    layouts, _, places = _places(measured, spec, Limits())
    data = pd.DataFrame([_pareto_row(measured, place) for place in places])
    front = _front(data)
    data["front"] = front
    with styled():
        strokes = layout_strokes(layouts)
        entries: list[Entry] = []
        if front.any():
            entries.append((Line2D([], [], color="#b5b5b5", linewidth=3), "front: beaten by no other point"))
        figure, ((ax,),) = sheet(
            [[Panel("", layout_entries(layouts, strokes))]],
            title=spec.title or f"Throughput against interactivity, workload {spec.workload}",
            key=[*entries, *_key(data)],
            axes_height_in=2.3,
            width_in={"auto": None, "column": COLUMN_IN, "page": PAGE_IN}[spec.width],
        )
        best = data[front].sort_values("user_tokens_s")
        ax.plot(best["user_tokens_s"], best["value"], color="#b5b5b5", linewidth=3, zorder=1)
        for layout in layouts:
            _pareto_line(ax, data[data["layout"] == layout.name], strokes[layout.name])
        ax.set_xlabel("Tokens per second of one user (1 / median ITL)", labelpad=2)
        ax.set_ylabel(f"Output tokens/s per {_accelerator(layouts)}")
        ax.margins(0.1)
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(FuncFormatter(_thousands))
    samples = [place.sample for place in places]
    cells, invalid = cells_of(samples)
    caption = (
        f"Output tokens per second and accelerator against tokens per second of one user (1,000 over the "
        f"median ITL in ms), workload {spec.workload}; a line runs through the concurrencies "
        f"between its ends. {samples_sentence(samples)} "
        "Bars are 95 % intervals, upright over server starts or runs, level over these or requests."
    )
    return Drawn(figure, spec, data, " ".join(caption.split()), cells, invalid)


def _places(
    measured: Measured, spec: FigureSpec, limits: Limits
) -> tuple[list[Layout], list[int], list[_Place]]:
    layouts = measured.layouts(spec.workload, spec.layouts)
    found = measured.concurrencies(spec.workload, layouts)
    loads = sorted(set(spec.concurrencies) or set().union(*map(set, found.values())))
    if "duration_s" not in measured.cells.columns or measured.cells["duration_s"].isna().all():
        raise UserError(
            "the cells state no durations, so there is no rate", where="cells", mend="measure them again"
        )
    rows = {str(row["cell_id"]): row for row in measured.cells.to_dict("records")}
    places = []
    for layout in layouts:
        for load in loads:
            for sample in measured.samples(spec.workload, layout, load, "itl_ms"):
                several = len({rows[cell]["restart"] for cell in sample.cells}) > 1
                runs = tuple(
                    _run(measured, cell, int(rows[cell]["restart"]) if several else k, rows[cell], limits)
                    for k, cell in enumerate(sample.cells)
                )
                asked = sum(len(measured.requests(cell)) for cell in sample.cells)
                places.append(_Place(sample, runs, int(rows[sample.cells[0]]["budget"]), asked))
    return layouts, loads, places


def _run(measured: Measured, cell: str, unit: int, row: Mapping[Any, Any], limits: Limits) -> Run:
    requests = measured.requests(cell)
    table = pa.table({name: pa.array(requests[name], from_pandas=True) for name in _SLO_COLUMNS})
    met = attained(table, Slo(ttft_ms=limits.ttft_ms, itl_ms=limits.itl_ms, itl_statistic="p99"))
    tokens = requests["output_tokens"].to_numpy(dtype=np.float64, na_value=0)[met]
    return Run(unit, float(row["duration_s"]), int(met.sum()), int(np.nan_to_num(tokens).sum()))


def _money_row(place: _Place, spec: FigureSpec, what: What) -> dict[str, Any]:
    if what == "goodput":
        rate = goodput(place.runs, place.budget)
        value, low, high = rate.value, rate.interval.low, rate.interval.high
    else:
        # Without a price an hour costs 1: the cost is in accelerator hours.
        cost = cost_per_million(place.runs, place.budget, spec.price_per_hour or 1.0)
        value, low, high = cost.value, cost.interval.low, cost.interval.high
    bounded = len({run.unit for run in place.runs}) > 1
    met = sum(run.met for run in place.runs)
    return {
        **about(place.sample),
        "repeats": len(place.runs),
        "asked": place.asked,
        "met": met,
        "value": value,
        "low": low if bounded else math.nan,
        "high": high if bounded else math.nan,
        "supported": bounded,
    }


def _pareto_row(measured: Measured, place: _Place) -> dict[str, Any]:
    rate: Rate = token_goodput(place.runs, place.budget)
    bounded = rate.units > 1
    row = {**about(place.sample), "repeats": len(place.runs)}
    median = low = high = math.nan
    if place.sample.values.size:
        reading = clustered_quantile(measured.units(place.sample.cells, "itl_ms"), 0.5)
        median, low, high = reading.value, reading.interval.low, reading.interval.high
    return {
        **row,
        "user_tokens_s": 1000 / median if median > 0 else math.nan,
        "user_low": 1000 / high if math.isfinite(high) and high > 0 else math.nan,
        "user_high": 1000 / low if math.isfinite(low) and low > 0 else math.nan,
        "value": rate.value,
        "low": rate.interval.low if bounded else math.nan,
        "high": rate.interval.high if bounded else math.nan,
        "supported": bounded and sample_gate(0.5, place.sample.requests).supported,
    }


def _front(data: pd.DataFrame) -> np.ndarray:
    """Which valid points no other valid point beats in both directions."""
    x, y = data["user_tokens_s"].to_numpy(), data["value"].to_numpy()
    ok = data["valid"].to_numpy(dtype=bool) & np.isfinite(x) & np.isfinite(y)
    beaten = np.array(
        [bool((ok & (x >= a) & (y >= b) & ((x > a) | (y > b))).any()) for a, b in zip(x, y, strict=True)]
    )
    return np.asarray(ok & ~beaten)


def _pareto_line(ax: Axes, mine: pd.DataFrame, stroke: dict[str, Any]) -> None:
    valid = mine[mine["valid"] & np.isfinite(mine["user_tokens_s"]) & np.isfinite(mine["value"])]
    ax.plot(valid["user_tokens_s"], valid["value"], **stroke)
    named = {valid["concurrency"].min(), valid["concurrency"].max()}
    for row in valid.to_dict("records"):
        x, y = row["user_tokens_s"], row["value"]
        for along, ends in (("x", (row["user_low"], row["user_high"])), ("y", (row["low"], row["high"]))):
            if all(map(math.isfinite, ends)):
                line = (ends, (y, y)) if along == "x" else ((x, x), ends)
                ax.plot(*line, color=stroke["color"], linewidth=0.8, zorder=2)
        ax.plot([x], [y], zorder=4, **mark_style(50, stroke["color"], bool(row["supported"])))
        if row["concurrency"] in named:
            name = f"c={row['concurrency']:g}"
            # Beside the point, not above it: at low loads the other line often passes there.
            ax.annotate(
                name,
                (x, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=6.5,
                zorder=6,
                path_effects=[withStroke(linewidth=2, foreground="white")],
            )
    bad = mine[~mine["valid"]]
    ax.plot(bad["user_tokens_s"], bad["value"], color=stroke["color"], zorder=5, **INVALID)


def _thousands(value: float, _: int | None = None) -> str:
    return f"{value:,.10g}"


def _accelerator(layouts: Sequence[Layout]) -> str:
    nouns = {layout.budget.split(" ", 1)[1].rstrip("s") for layout in layouts}
    return nouns.pop() if len(nouns) == 1 else "accelerator"


def _labels(layouts: Sequence[Layout], spec: FigureSpec, what: What) -> tuple[str, str]:
    noun = _accelerator(layouts)
    if what == "goodput":
        return "Goodput", f"Goodput (requests/s per {noun})"
    money_unit = spec.currency or "" if spec.price_per_hour else f"{noun} hours"
    return "Cost of a million output tokens", f"Cost per million tokens ({money_unit})"


def _dress_value(ax: Axes, data: pd.DataFrame, spec: FigureSpec) -> None:
    ends = data[data["valid"]] if data["valid"].any() else data
    values = ends[["value", "high"]].to_numpy(dtype=np.float64).ravel()
    values = values[np.isfinite(values)]
    above = values[values > 0]
    if above.size and spec.figure == "cost" and above.max() > 20 * above.min():
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=12))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_major_formatter(FuncFormatter(_thousands))
        ax.set_ylim(float(above.min()) / 1.3, float(above.max()) * 1.3)
        return
    ax.set_ylim(0, float(values.max()) * 1.08 if values.size and values.max() > 0 else 1)
    ax.yaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_major_formatter(FuncFormatter(_thousands))


def _key(data: pd.DataFrame) -> list[Entry]:
    valid = data[data["valid"]]
    entries: list[Entry] = []
    if (np.isfinite(valid["low"]) & np.isfinite(valid["high"])).any():
        entries.append(
            (Line2D([], [], color=NEUTRAL, linewidth=0.8, marker="|", markersize=4), "95 % interval")
        )
    if (~valid["supported"].astype(bool)).any():
        entries.append(
            (Line2D([], [], **mark_style(50, NEUTRAL, False)), "hollow: one run or start, no interval")
        )
    if (~data["valid"].astype(bool)).any():
        entries.append((Line2D([], [], color=NEUTRAL, **INVALID), "invalid cell: no result"))
    return entries
