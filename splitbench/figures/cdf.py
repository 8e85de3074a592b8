# SPDX-License-Identifier: Apache-2.0
"""Distributions of one latency: by concurrency with a panel per layout, or of all layouts at one load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from splitbench.errors import UserError
from splitbench.figures.curves import (
    METRIC_AXES,
    METRIC_SHORT,
    Drawn,
    cells_of,
    data_frame,
    draw_curve,
    dress,
    extent_of,
    key_entries,
    left_out,
    legend_entry,
    samples_sentence,
)
from splitbench.figures.ecdf import Extent
from splitbench.figures.measured import Layout, Measured, Metric, Sample
from splitbench.figures.sheet import COLUMN_IN, PAGE_IN, Entry, Panel, sheet
from splitbench.figures.spec import FigureSpec
from splitbench.figures.style import layout_strokes, load_strokes, styled
from splitbench.figures.tail import dress_tail, hatch_unsupported, tail_extent, unsupported_entry

_SHARE = {"itl_ms": "Share of ITLs", "ttft_ms": "Share of requests"}


def by_concurrency(measured: Measured, spec: FigureSpec, *, metric: Metric, survival: bool = False) -> Drawn:
    """One panel per layout, aggregated above PD, one line per concurrency, both axes shared by all panels.

    Layouts of several budgets stand in columns, one per budget.

    Raises:
        UserError: no such workload, layout or concurrency, or nothing but totals was recorded.
    """
    layouts = measured.layouts(spec.workload, spec.layouts)
    if metric == "handoff_gap_ms":
        layouts = _handing_off(layouts, spec)
    found = measured.concurrencies(spec.workload, layouts)
    wanted = sorted(set(spec.concurrencies) or {value for values in found.values() for value in values})
    per_layout = {
        layout.name: [
            sample for value in wanted for sample in measured.samples(spec.workload, layout, value, metric)
        ]
        for layout in layouts
    }
    samples = [sample for group in per_layout.values() for sample in group]
    _require_some(samples, spec)
    with styled():
        extent = tail_extent(samples, spec.window) if survival else extent_of(samples, spec.window)
        strokes = load_strokes(wanted)
        grid = _arranged(layouts)
        panels = [
            [
                Panel(
                    layout.words,
                    [
                        legend_entry(sample, f"c={sample.concurrency}", strokes[sample.concurrency])
                        for sample in per_layout[layout.name]
                    ],
                )
                for layout in row
            ]
            for row in grid
        ]
        what = _headed(metric, survival)
        title = spec.title or f"{what} by concurrency (c), workload {spec.workload}"
        figure, axes = sheet(
            panels, title=title, key=_key(samples, extent, spec, survival), width_in=_width(spec)
        )
        for row_axes, row in zip(axes, grid, strict=True):
            for ax, layout in zip(row_axes, row, strict=True):
                for sample in per_layout[layout.name]:
                    draw_curve(ax, sample, extent, strokes[sample.concurrency], spec, survival=survival)
                _dress(ax, extent, spec, metric, survival)
                if survival:
                    hatch_unsupported(ax, per_layout[layout.name])
    caption = (
        f"{_form(survival)} of {METRIC_SHORT[metric]}, workload {spec.workload}: one panel per layout, "
        f"same axes, one line per concurrency c (requests in flight). "
        f"{samples_sentence(samples)} {left_out(samples, extent)}"
    )
    return _drawn(figure, spec, [data_frame(samples, extent, spec)], caption, samples)


def of_layouts(
    measured: Measured, spec: FigureSpec, *, metrics: Sequence[Metric], survival: bool = False
) -> Drawn:
    """All layouts at one concurrency in one panel per metric; colour is budget, line style is kind.

    Where TTFTs of different content meet (first token from the prefiller in one layout only), the panel of
    the time to second token, which has the same content everywhere, is put beside, whatever was asked.

    Raises:
        UserError: no such workload or layout, no shared concurrency, or nothing but totals was recorded.
    """
    layouts = measured.layouts(spec.workload, spec.layouts)
    concurrency = spec.concurrency or measured.highest_shared(spec.workload, layouts)
    mixed = len({layout.first_from_prefiller for layout in layouts}) > 1
    metrics = list(metrics)
    if "ttft_ms" in metrics and mixed and "second_token_ms" not in metrics:
        metrics.append("second_token_ms")
    per_metric = {
        metric: [
            s for layout in layouts for s in measured.samples(spec.workload, layout, concurrency, metric)
        ]
        for metric in metrics
    }
    samples = [sample for group in per_metric.values() for sample in group]
    _require_some(samples, spec)
    with styled():
        extent = tail_extent(samples, spec.window) if survival else extent_of(samples, spec.window)
        strokes = layout_strokes(layouts)
        panels = [
            Panel(_panel_title(metric, layouts, mixed) if len(metrics) > 1 else "") for metric in metrics
        ]
        # The same lines in every panel: one legend, under the last.
        panels[-1].entries = [
            legend_entry(sample, sample.layout.words, strokes[sample.layout.name])
            for sample in per_metric[metrics[0]]
        ]
        what = _headed(metrics[0], survival)
        title = spec.title or f"{what} of the layouts at c={concurrency}, workload {spec.workload}"
        aside = spec.width == "page" and len(panels) > 1
        figure, axes = sheet(
            [panels] if aside else [[panel] for panel in panels],
            title=title,
            key=_key(samples, extent, spec, survival),
            axes_height_in=2.0,
            width_in=_width(spec),
        )
        flat = [ax for row in axes for ax in row]
        for ax, metric in zip(flat, metrics, strict=True):
            for sample in per_metric[metric]:
                draw_curve(ax, sample, extent, strokes[sample.layout.name], spec, survival=survival)
            _dress(ax, extent, spec, metric, survival)
            if survival:
                hatch_unsupported(ax, per_metric[metric])
    first = per_metric[metrics[0]]
    caption = (
        f"{_form(survival)} of {METRIC_SHORT[metrics[0]]}, workload {spec.workload}, at concurrency {concurrency}; "
        f"colour is the budget, line style the kind. "
        f"{samples_sentence(first)} {left_out(samples, extent)}"
    )
    if "ttft_ms" in metrics and mixed:
        early = ", ".join(layout.name for layout in layouts if layout.first_from_prefiller)
        caption += (
            f" In {early} the prefiller sends the first token: its TTFT leaves out the KV move and the "
            "decoder's queue. Compare by the time to second token, which has the same content everywhere."
        )
    frames = [data_frame(per_metric[metric], extent, spec) for metric in metrics]
    return _drawn(figure, spec, frames, caption, samples)


def _handing_off(layouts: Sequence[Layout], spec: FigureSpec) -> list[Layout]:
    """Layouts whose prefiller sends the first token: elsewhere the hand-off lies inside the TTFT, unseen."""
    found = [layout for layout in layouts if layout.first_from_prefiller]
    if not found:
        raise UserError(
            f"no layout of workload '{spec.workload}' sends the first token early, so no hand-off gap shows",
            where="figures",
            mend="leave this figure out",
        )
    return found


def _headed(metric: Metric, survival: bool) -> str:
    """`ITL CDF`, `Time to second token tail`: the beginning of a title."""
    short = METRIC_SHORT[metric]
    return f"{short[0].upper()}{short[1:]} {'tail' if survival else 'CDF'}"


def _panel_title(metric: Metric, layouts: Sequence[Layout], mixed: bool) -> str:
    if metric == "ttft_ms" and mixed:
        early = ", ".join(layout.name for layout in layouts if layout.first_from_prefiller)
        return f"TTFT: not the same content in all ({early}: from the prefiller)"
    if metric == "second_token_ms":
        return "Time to second token: the same content in all"
    return METRIC_AXES[metric].removesuffix(" (ms)")


def _arranged(layouts: Sequence[Layout]) -> list[list[Layout]]:
    """One column per budget where every budget has the same number of layouts, otherwise one column."""
    budgets = list(dict.fromkeys(layout.budget for layout in layouts))
    columns = [[layout for layout in layouts if layout.budget == budget] for budget in budgets]
    if len(columns) == 2 and len(columns[0]) == len(columns[1]) > 1:
        return [list(row) for row in zip(*columns, strict=True)]
    return [[layout] for layout in layouts]


def _key(samples: Sequence[Sample], extent: Extent, spec: FigureSpec, survival: bool) -> list[Entry]:
    entries = key_entries(samples, extent, spec)
    return [*entries, unsupported_entry()] if survival else entries


def _width(spec: FigureSpec) -> float | None:
    return {"auto": None, "column": COLUMN_IN, "page": PAGE_IN}[spec.width]


def _form(survival: bool) -> str:
    return "Share of values above x (logarithmic)" if survival else "Cumulative distribution"


def _dress(ax: Axes, extent: Extent, spec: FigureSpec, metric: Metric, survival: bool) -> None:
    share = _SHARE.get(metric, "Share of requests")
    if survival:
        dress_tail(ax, extent, spec, x_label=METRIC_AXES[metric], y_label=f"{share} above x")
    else:
        dress(ax, extent, spec, x_label=METRIC_AXES[metric], y_label=f"{share} up to x")


def _require_some(samples: Sequence[Sample], spec: FigureSpec) -> None:
    if not any(sample.values.size for sample in samples):
        raise UserError(
            f"no latencies of single requests for {spec.figure} of workload '{spec.workload}'",
            where="figures",
            mend="record them (vllm bench serve --save-detailed) and measure these cells again",
        )


def _drawn(
    figure: Any, spec: FigureSpec, frames: list[pd.DataFrame], caption: str, samples: Sequence[Sample]
) -> Drawn:
    cells, invalid = cells_of(samples)
    data = pd.concat(frames, ignore_index=True)
    return Drawn(figure, spec, data, " ".join(caption.split()), cells, invalid)
