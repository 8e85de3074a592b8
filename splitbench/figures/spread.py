# SPDX-License-Identifier: Apache-2.0
"""Where the spread of a latency comes from: server starts, runs or requests, as shares of the variance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from splitbench.figures.curves import METRIC_AXES, Drawn, about, cells_of, samples_sentence
from splitbench.figures.measured import Layout, Measured, Metric, Sample
from splitbench.figures.nothing import nothing
from splitbench.figures.sheet import COLUMN_IN, PAGE_IN, Entry, Panel, sheet
from splitbench.figures.spec import FigureSpec
from splitbench.figures.style import styled
from splitbench.statistics.variance import VarianceSplit, variance_split

_METRICS: tuple[Metric, ...] = ("ttft_ms", "second_token_ms", "e2e_ms")
# Okabe and Ito: apart in hue and in lightness, so that they stay apart in grey.
_PARTS = {"restart": "#d55e00", "run": "#56b4e9", "request": "#1c2a7a"}
_WORDS = {"restart": "server starts", "run": "runs of one start", "request": "requests of one run"}
_UNKNOWN: dict[str, Any] = {"facecolor": "none", "edgecolor": "#9a9a9a", "hatch": "////", "linewidth": 0}


def variance_bars(measured: Measured, spec: FigureSpec) -> Drawn:
    """Per layout one bar for each latency of whole requests, at one concurrency.

    What one start or one run cannot tell from the level below is hatched in the margin, not guessed.

    Raises:
        UserError: no such workload or layout, or no shared concurrency.
    """
    layouts = measured.layouts(spec.workload, spec.layouts)
    concurrency = spec.concurrency or measured.highest_shared(spec.workload, layouts, valid=True)
    samples: list[Sample] = []
    rows: list[dict[str, Any]] = []
    for metric in _METRICS:
        for layout in layouts:
            for sample in measured.samples(spec.workload, layout, concurrency, metric):
                samples.append(sample)
                if sample.valid and sample.values.size:
                    rows += _rows(sample, _split(measured, sample))
    if not rows:
        cells, invalid = cells_of(samples)
        why = f"No valid latencies of single requests at c={concurrency}, workload {spec.workload}."
        return nothing(spec, f"Where the spread comes from, workload {spec.workload}", why, cells, invalid)
    data = pd.DataFrame(rows)
    with styled():
        panels = [[Panel(METRIC_AXES[metric].removesuffix(" (ms)"))] for metric in _METRICS]
        figure, axes = sheet(
            panels,
            title=spec.title or f"Where the spread comes from, c={concurrency}, workload {spec.workload}",
            key=_key(data),
            axes_height_in=0.16 + 0.24 * len(layouts),
            width_in={"auto": None, "column": COLUMN_IN, "page": PAGE_IN}[spec.width],
        )
        for (ax,), metric in zip(axes, _METRICS, strict=True):
            _bars(ax, data[data["metric"] == metric], layouts)
    cells, invalid = cells_of(samples)
    counts = data.drop_duplicates(["layout"])[["layout", "restarts", "runs"]]
    told = "; ".join(
        f"{row['layout']}: {row['restarts']} starts, {row['runs']} runs" for row in counts.to_dict("records")
    )
    caption = (
        f"Variance of three latencies at concurrency {concurrency}, workload {spec.workload}, parted by a nested "
        f"analysis of variance ({told}). Hatched: not to be told apart with one start or one run per start; it is "
        f"then part of the level below. {samples_sentence([s for s in samples if s.metric == 'ttft_ms'])}"
    )
    return Drawn(figure, spec, data, " ".join(caption.split()), cells, invalid)


def _split(measured: Measured, sample: Sample) -> VarianceSplit:
    rows = measured.cells.set_index("cell_id")
    restarts, runs = [], []
    for number, (cell, part) in enumerate(zip(sample.cells, sample.parts, strict=True)):
        restarts.append(np.full(part.size, int(rows.loc[cell, "restart"]), dtype=np.int64))
        runs.append(np.full(part.size, number, dtype=np.int64))
    return variance_split(np.concatenate(sample.parts), np.concatenate(restarts), np.concatenate(runs))


def _rows(sample: Sample, split: VarianceSplit) -> list[dict[str, Any]]:
    shares = split.shares
    return [
        {
            **about(sample),
            "part": part,
            "share": shares.get(part, math.nan),
            "variance_ms2": math.nan if (found := getattr(split, part)) is None else found,
            "restarts": split.restarts,
            "runs": split.runs,
        }
        for part in _PARTS
    ]


def _bars(ax: Axes, data: pd.DataFrame, layouts: list[Layout]) -> None:
    for place, layout in enumerate(layouts):
        left = 0.0
        mine = data[data["layout"] == layout.name].set_index("part")
        for part, colour in _PARTS.items():
            if part not in mine.index or not math.isfinite(mine.loc[part, "share"]):
                continue
            share = float(mine.loc[part, "share"])
            ax.barh(place, share, left=left, height=0.66, color=colour)
            if share >= 0.12:
                dark = part != "run"
                ax.text(
                    left + share / 2,
                    place,
                    f"{100 * share:.0f} %",
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white" if dark else "black",
                )
            left += share
        unknown = [
            part for part in _PARTS if part in mine.index and not math.isfinite(mine.loc[part, "share"])
        ]
        if unknown or mine.empty:
            ax.barh(place, 0.06 if left else 1.0, left=1.01 if left else 0.0, height=0.66, **_UNKNOWN)
    ax.set_xlim(0, 1.08)
    ax.set_ylim(len(layouts) - 0.4, -0.6)
    ax.set_yticks(range(len(layouts)), [layout.name for layout in layouts])
    ax.tick_params(axis="y", length=0, labelsize=6.5)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    ax.set_xlabel("Share of the variance", labelpad=2)


def _key(data: pd.DataFrame) -> list[Entry]:
    found = data[np.isfinite(data["share"])]["part"].unique()
    entries: list[Entry] = [
        (Patch(facecolor=colour), f"between {_WORDS[part]}")
        for part, colour in _PARTS.items()
        if part in found
    ]
    if (~np.isfinite(data["share"])).any():
        entries.append((Patch(**_UNKNOWN), "a level that cannot be told apart"))
    return entries
