# SPDX-License-Identifier: Apache-2.0
"""Why ITLs spike and TTFTs climb in stairs: one cell in time, its tokens above, its requests' waits below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from splitbench.errors import UserError
from splitbench.figures.curves import Drawn
from splitbench.figures.ecdf import Floats
from splitbench.figures.measured import Layout, Measured
from splitbench.figures.sheet import COLUMN_IN, PAGE_IN, Entry, Panel, sheet
from splitbench.figures.spec import FigureSpec
from splitbench.figures.style import BUDGET_COLOURS, SLO_COLOUR, styled

# A gap this many times the cell's median is a spike: far above what batching alone does to a decode step.
SPIKE = 3.0
_STARTS_SHOWN = 12
_WAITS_IN_WINDOW = 6.0
_CALM, _SPIKED, _WAIT, _DECODE = "#8a8f98", BUDGET_COLOURS[1], BUDGET_COLOURS[0], "#d3d7dc"


@dataclass(frozen=True)
class Timeline:
    """One cell in seconds after its first request. A gap lies at the time its token came."""

    cell_id: str
    layout: Layout
    valid: bool
    requests: pd.DataFrame
    token_s: Floats
    token_request: Floats
    itl_ms: Floats
    spike_ms: float

    def beside_a_wait(self, chosen: np.ndarray) -> float:
        """Share of the chosen gaps that overlap the wait of another request for its first token."""
        end = self.token_s[chosen]
        begin = end - self.itl_ms[chosen] / 1000
        start = self.requests["start_s"].to_numpy()
        first = start + self.requests["ttft_ms"].to_numpy() / 1000
        # Waits begun before the gap's end less those over by its begin: one's own was over by then.
        open_waits = np.searchsorted(np.sort(start), end, side="left") - np.searchsorted(
            np.sort(first), begin, side="right"
        )
        return float((open_waits > 0).mean())


def timeline(measured: Measured, spec: FigureSpec) -> Drawn:
    """For one layout, or two side by side, one cell at one concurrency: ITLs above waits and decodes.

    Raises:
        UserError: no such workload or layout, more than two layouts, or the source states no start times.
    """
    layouts = measured.layouts(spec.workload, spec.layouts)
    if len(layouts) > 2:
        aggregated = [layout for layout in layouts if layout.kind == "aggregated"]
        others = [layout for layout in layouts if layout.kind != "aggregated"]
        layouts = [*aggregated[:1], *others[:1]] if aggregated and others else layouts[:2]
    concurrency = spec.concurrency or measured.highest_shared(spec.workload, layouts, valid=True)
    lines = [_timeline(measured, spec, layout, concurrency) for layout in layouts]
    windows = [spec.time_window_s] * len(lines) if spec.time_window_s else _busy(lines)
    with styled():
        side_by_side = len(lines) > 1 and spec.width != "column"
        top = [Panel(f"{line.layout.words}{'' if line.valid else ': INVALID cell'}") for line in lines]
        below = [Panel("Requests: wait for the first token, then decode") for _ in lines]
        grid = (
            [top, below]
            if side_by_side
            else [[panel] for pair in zip(top, below, strict=True) for panel in pair]
        )
        title = spec.title or f"ITLs against other requests' waits, c={concurrency}, workload {spec.workload}"
        width = {"auto": None, "column": COLUMN_IN, "page": PAGE_IN}[spec.width]
        figure, axes = sheet(
            grid, title=title, key=_key(spec), width_in=width, shared=False, axes_height_in=1.45
        )
        pairs = (
            list(zip(axes[0], axes[1], strict=True))
            if side_by_side
            else [(axes[2 * i][0], axes[2 * i + 1][0]) for i in range(len(lines))]
        )
        low = min(float(np.quantile(line.itl_ms, 0.005)) for line in lines) * 0.8
        high = max(float(line.itl_ms.max()) for line in lines) * 1.3
        frames: list[pd.DataFrame] = []
        for line, window, (upper, lower) in zip(lines, windows, pairs, strict=True):
            frames.append(_draw_tokens(upper, line, window, spec))
            frames.append(_draw_requests(lower, line, window))
            upper.set_ylim(max(low, 1e-3), high)
    caption = " ".join(
        [
            f"One cell per layout in time, workload {spec.workload}, concurrency {concurrency}.",
            "Above, every ITL at the moment its token came; spikes, in colour, are",
            f"{SPIKE:g} times the cell's median or more. Below, each request: dark while it waits",
            "for its first token (queue and prefill), light while it decodes.",
            *(_sentence(line) for line in lines),
        ]
    )
    cells = tuple(sorted(line.cell_id for line in lines))
    invalid = tuple(sorted(line.cell_id for line in lines if not line.valid))
    return Drawn(figure, spec, pd.concat(frames, ignore_index=True), caption, cells, invalid)


def _timeline(measured: Measured, spec: FigureSpec, layout: Layout, concurrency: int) -> Timeline:
    samples = measured.samples(spec.workload, layout, concurrency, "itl_ms")
    filled = [sample for sample in samples if sample.values.size]
    if not filled:
        raise UserError(
            f"no ITLs of {layout.name} at c={concurrency}, workload '{spec.workload}'",
            where="figures: interference",
            mend="choose a layout and concurrency whose cell was recorded in detail",
        )
    cell_id = filled[0].cells[0]
    requests = measured.requests(cell_id)
    requests = requests[requests["ok"].to_numpy(dtype=bool)].sort_values("start_s", kind="stable")
    if requests["start_s"].isna().all():
        raise UserError(
            "the result states no start times", where=cell_id, mend="measure it with vLLM 0.9 or newer"
        )
    tokens = measured.tokens(cell_id)
    order = np.lexsort((tokens.position, tokens.request))
    owner, itl = tokens.request[order], tokens.itl_ms[order]
    by_name = requests.set_index("request")
    first_s = by_name["start_s"] + by_name["ttft_ms"] / 1000
    _, begins = np.unique(owner, return_index=True)
    sums = np.cumsum(itl)
    before = np.repeat(np.concatenate([[0.0], sums])[begins], np.diff(np.append(begins, owner.size)))
    token_s = first_s.reindex(owner).to_numpy() + (sums - before) / 1000
    return Timeline(
        cell_id=cell_id,
        layout=layout,
        valid=filled[0].valid,
        requests=requests,
        token_s=token_s,
        token_request=owner,
        itl_ms=itl,
        spike_ms=SPIKE * float(np.median(itl)),
    )


def _busy(lines: list[Timeline]) -> list[tuple[float, float]]:
    """Per cell a stretch from its middle on, equally long for all, for they are compared.

    Long enough for twelve starts with their first tokens, and for one whole request unless its decode is so
    much longer than the waits that these would not show.
    """
    begins, lengths, ends = [], [], []
    for line in lines:
        start = line.requests["start_s"].to_numpy()
        first = start + line.requests["ttft_ms"].to_numpy() / 1000
        middle = max(0, start.size // 2 - _STARTS_SHOWN // 2)
        shown = slice(middle, middle + _STARTS_SHOWN)
        waits = float(np.nanmax(first[shown]) - start[middle])
        whole = 1.25 * float(line.requests["e2e_ms"].median()) / 1000
        begins.append(float(start[middle]))
        lengths.append(max(waits, min(whole, _WAITS_IN_WINDOW * waits)))
        ends.append(float(np.nanmax(line.token_s)))
    length = max(lengths) or 0.1
    margin = 0.04 * length
    begins = [max(0.0, min(begin, end - length)) for begin, end in zip(begins, ends, strict=True)]
    return [(max(0.0, begin - margin), begin + length + margin) for begin in begins]


def _draw_tokens(ax: Axes, line: Timeline, window: tuple[float, float], spec: FigureSpec) -> pd.DataFrame:
    inside = (line.token_s >= window[0]) & (line.token_s <= window[1])
    seconds, itl = line.token_s[inside], line.itl_ms[inside]
    spiked = itl >= line.spike_ms
    ax.plot(seconds[~spiked], itl[~spiked], ".", color=_CALM, markersize=1.6, rasterized=True)
    ax.plot(seconds[spiked], itl[spiked], ".", color=_SPIKED, markersize=3.2, rasterized=True)
    if spec.slo_ms is not None:
        ax.axhline(spec.slo_ms, color=SLO_COLOUR, linewidth=0.8, zorder=1.2)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=9))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel("ITL (ms)")
    _time_axis(ax, window)
    return pd.DataFrame(
        {
            "cell_id": line.cell_id,
            "what": np.where(spiked, "spike", "itl"),
            "request": line.token_request[inside],
            "from_s": seconds - itl / 1000,
            "to_s": seconds,
            "itl_ms": itl,
        }
    )


def _draw_requests(ax: Axes, line: Timeline, window: tuple[float, float]) -> pd.DataFrame:
    requests = line.requests
    start = requests["start_s"].to_numpy()
    first = start + requests["ttft_ms"].to_numpy() / 1000
    end = start + requests["e2e_ms"].to_numpy() / 1000
    inside = (start <= window[1]) & (end >= window[0])
    start, first, end = start[inside], first[inside], end[inside]
    rows = np.arange(start.size)
    for begins, ends, colour, width in ((first, end, _DECODE, 2.0), (start, first, _WAIT, 2.4)):
        segments = np.stack([np.stack([begins, rows], 1), np.stack([ends, rows], 1)], 1)
        ax.add_collection(
            LineCollection(list(segments), colors=colour, linewidths=min(width, 80 / max(start.size, 1)))
        )
    ax.set_ylim(start.size - 0.2, -0.8)
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.set_ylabel("Request, by start")
    _time_axis(ax, window)
    names = requests["request"].to_numpy()[inside]
    parts = [
        pd.DataFrame(
            {
                "cell_id": line.cell_id,
                "what": what,
                "request": names,
                "from_s": a,
                "to_s": b,
                "itl_ms": np.nan,
            }
        )
        for what, a, b in (("wait", start, first), ("decode", first, end))
    ]
    return pd.concat(parts, ignore_index=True)


def _time_axis(ax: Axes, window: tuple[float, float]) -> None:
    ax.set_xlim(*window)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.set_xlabel("Time since the cell's first request (s)", labelpad=2)


def _sentence(line: Timeline) -> str:
    """How many gaps are spikes, and how many of those fell into another request's wait, in the whole cell."""
    spiked = line.itl_ms >= line.spike_ms
    count = int(spiked.sum())
    share = f"{100 * count / spiked.size:.2g} % of {spiked.size:,} ITLs are spikes"
    if not count:
        return f"{line.layout.name}: none of {spiked.size:,} ITLs is a spike."
    beside, usual = line.beside_a_wait(spiked), line.beside_a_wait(~spiked)
    return (
        f"{line.layout.name}: {share}; {100 * beside:.0f} % of them while another request waited "
        f"for its first token (of the other ITLs, {100 * usual:.0f} %)."
    )


def _key(spec: FigureSpec) -> list[Entry]:
    dot: dict[str, Any] = {"linestyle": "none", "marker": "."}
    entries: list[Entry] = [
        (Line2D([], [], color=_CALM, markersize=3, **dot), "ITL"),
        (Line2D([], [], color=_SPIKED, markersize=6, **dot), f"spike (from {SPIKE:g} x median)"),
        (Line2D([], [], color=_WAIT, linewidth=2.4), "waits for its first token"),
        (Line2D([], [], color=_DECODE, linewidth=2.4), "decodes"),
    ]
    if spec.slo_ms is not None:
        entries.append((Line2D([], [], color=SLO_COLOUR, linewidth=0.8), f"SLO {spec.slo_ms:g} ms"))
    return entries
