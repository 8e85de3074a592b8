# SPDX-License-Identifier: Apache-2.0
"""What engines, GPUs, host and client did during one cell: a panel per metric, a line per source."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from splitbench.figures.curves import Drawn
from splitbench.figures.measured import Layout, Measured
from splitbench.figures.nothing import nothing
from splitbench.figures.sheet import COLUMN_IN, PAGE_IN, Panel, sheet
from splitbench.figures.spec import FigureSpec
from splitbench.figures.style import BUDGET_COLOURS, styled

_MOST_PANELS = 8
_DASHES: tuple[Any, ...] = ("solid", (0, (4.0, 1.6)), (0, (1.6, 1.2)))
# Shown first, where they were watched; the others follow by name.
_FIRST = ("running", "waiting", "kv", "cpu", "sm_clock", "power", "memory")


def telemetry(measured: Measured, spec: FigureSpec) -> Drawn:
    """One cell per layout, at one concurrency, in columns side by side (two layouts at most).

    Raises:
        UserError: no such workload or layout, or no shared concurrency.
    """
    layouts = measured.layouts(spec.workload, spec.layouts)
    concurrency = spec.concurrency or measured.highest_shared(spec.workload, layouts, valid=True)
    if len(layouts) > 2:
        pd_ones = [layout for layout in layouts if layout.kind == "pd"]
        layouts = [layouts[0], *(pd_ones[:1] or layouts[1:2])]
    found: list[tuple[Layout, str, bool, pd.DataFrame]] = []
    for layout in layouts:
        rows = measured.cells[
            (measured.cells["workload"] == spec.workload)
            & (measured.cells["layout"] == layout.name)
            & (measured.cells["concurrency"] == concurrency)
        ]
        for row in rows.to_dict("records"):
            samples = measured.telemetry(str(row["cell_id"]))
            if len(samples):
                found.append((layout, str(row["cell_id"]), row["verdict"] != "invalid", samples))
                break
    if not found:
        why = f"Nothing was watched during the cells of workload {spec.workload} at c={concurrency}."
        return nothing(spec, f"Telemetry at c={concurrency}, workload {spec.workload}", why)
    metrics = _chosen([samples for *_, samples in found])
    data = pd.concat(
        [
            samples.assign(cell_id=cell, layout=layout.name, valid=valid)[
                ["cell_id", "layout", "valid", "metric", "source", "time_s", "value"]
            ]
            for layout, cell, valid, samples in found
        ],
        ignore_index=True,
    )
    data = data[data["metric"].isin(metrics)].sort_values(["layout", "metric", "source", "time_s"])
    sources = sorted(data["source"].unique())
    strokes = {
        source: {
            "color": BUDGET_COLOURS[k % len(BUDGET_COLOURS)],
            "linestyle": _DASHES[(k // len(BUDGET_COLOURS)) % len(_DASHES)],
            "linewidth": 0.9,
        }
        for k, source in enumerate(sources)
    }
    with styled():
        grid = [
            [
                Panel(f"{layout.name}{'' if valid else ' (INVALID cell)'}: {metric}")
                for layout, _, valid, _ in found
            ]
            for metric in metrics
        ]
        figure, axes = sheet(
            grid,
            title=spec.title or f"Telemetry at c={concurrency}, workload {spec.workload}",
            key=[(Line2D([], [], **strokes[source]), source) for source in sources],
            axes_height_in=0.8,
            shared=False,
            width_in={"auto": None, "column": COLUMN_IN, "page": PAGE_IN}[spec.width],
        )
        times = data["time_s"].min(), data["time_s"].max()
        for metric, row in zip(metrics, axes, strict=True):
            of_metric = data[data["metric"] == metric]
            top = float(of_metric["value"].max())
            low = min(0.0, float(of_metric["value"].min()))
            for (layout, _, _, _), ax in zip(found, row, strict=True):
                mine = of_metric[of_metric["layout"] == layout.name]
                for source, line in mine.groupby("source", sort=True):
                    ax.plot(line["time_s"], line["value"], drawstyle="steps-post", **strokes[str(source)])
                # The same axes for both layouts: they are compared.
                ax.set_xlim(times[0], max(times[1], times[0] + 1))
                ax.set_ylim(low, top * 1.08 if top > low else low + 1)
                ax.yaxis.set_major_locator(MaxNLocator(4))
                ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
                ax.set_xlabel("Time since the cell's start (s)", labelpad=2)
    cells = tuple(sorted(cell for _, cell, _, _ in found))
    counts = ", ".join(f"{layout.name} {len(samples):,}" for layout, _, _, samples in found)
    caption = (
        f"What was watched during one cell of each layout, workload {spec.workload}, concurrency {concurrency} "
        f"(samples: {counts}). Columns have the same axes."
    )
    every = {str(metric) for *_, samples in found for metric in samples["metric"].unique()}
    if len(every) > len(metrics):
        caption += f" Not shown: {', '.join(sorted(every - set(metrics)))}."
    invalid = tuple(sorted(cell for _, cell, valid, _ in found if not valid))
    return Drawn(figure, spec, data.reset_index(drop=True), caption, cells, invalid)


def _chosen(tables: list[pd.DataFrame]) -> list[str]:
    """Metrics that change during the cell before those that stand still, the well-known ones first."""
    names = sorted({str(name) for table in tables for name in table["metric"].unique()})

    def rank(name: str) -> tuple[bool, int, str]:
        spread = max(
            float(np.ptp(values)) if len(values := table.loc[table["metric"] == name, "value"]) else 0.0
            for table in tables
        )
        known = next((k for k, part in enumerate(_FIRST) if part in name), len(_FIRST))
        return spread == 0, known, name

    return sorted(names, key=rank)[:_MOST_PANELS]
