# SPDX-License-Identifier: Apache-2.0
"""Page geometry in inches: panels, legends and key never overlap, for each has its own strip of paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

COLUMN_IN = 3.5
PAGE_IN = 7.0

_LEFT, _RIGHT, _BETWEEN = 0.62, 0.12, 0.7
_LABEL = 0.5  # from the axis to the middle of its label: room for ticks such as 0.001%
_INDENT = 0.1  # where titles and legends begin
_TOP, _BOTTOM = 0.06, 0.06
_X_AXIS = 0.36
_GAP = 0.12
_LINE = 1.42  # line height over font size
_HANDLE = 3.1  # legend handle and its padding, in font sizes

Entry = tuple[Any, str]


@dataclass
class Panel:
    """One set of axes: its title and the legend under it."""

    title: str
    entries: list[Entry] = field(default_factory=list)


def text_width_in(text: str, size_pt: float, weight: str = "normal") -> float:
    """Width in inches of one line of text in the style's font."""
    font = FontProperties(size=size_pt, weight=weight)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, False)
    # Renderers round every glyph to their pixels: up to a twentieth more than the outline.
    return 1.05 * float(width) / 72


def wrapped(text: str, width_in: float, size_pt: float, weight: str = "normal") -> list[str]:
    """Lines no wider than `width_in`, broken at spaces (a single longer word stands alone)."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width_in(longer, size_pt, weight) <= width_in:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


@dataclass(frozen=True)
class _Legend:
    handles: list[Any]
    labels: list[str]
    columns: int
    height: float


def _legend(entries: Sequence[Entry], width: float, size: float) -> _Legend:
    if not entries:
        return _Legend([], [], 1, 0.0)
    handle, space = _HANDLE * size / 72, 1.2 * size / 72
    labels = ["\n".join(wrapped(label, width - handle, size)) for _, label in entries]
    widths = [max(text_width_in(line, size) for line in label.split("\n")) + handle for label in labels]
    lines = [label.count("\n") + 1 for label in labels]
    columns, filled = 1, [range(len(labels))]
    for wanted in range(len(labels), 0, -1):
        filled = _columns(len(labels), wanted)
        columns = len(filled)
        if sum(max(widths[i] for i in column) + space for column in filled) - space <= width:
            break
    height = max(sum(lines[i] for i in column) for column in filled) * _LINE * size / 72
    return _Legend([handle for handle, _ in entries], labels, columns, height)


def _flowed(entries: Sequence[Entry], width: float, size: float) -> list[_Legend]:
    """Entries side by side like words of a paragraph, each line a legend of its own."""
    lines: list[list[Entry]] = []
    used = 0.0
    for entry in entries:
        wide = text_width_in(entry[1], size) + (_HANDLE + 1.2) * size / 72
        if lines and used + wide <= width:
            lines[-1].append(entry)
            used += wide
        else:
            lines.append([entry])
            used = wide
    return [_legend(line, width, size) for line in lines]


def _columns(entries: int, columns: int) -> list[range]:
    """Which entries stand in which column, as matplotlib does it: the first columns are one longer."""
    least, more = divmod(entries, columns)
    sizes = [least + (column < more) for column in range(columns)]
    starts = [sum(sizes[:column]) for column in range(columns)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def sheet(
    grid: Sequence[Sequence[Panel]],
    *,
    title: str,
    key: Sequence[Entry] = (),
    axes_height_in: float = 1.55,
    width_in: float | None = None,
    shared: bool = True,
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a grid of panels; under each its legend, under all the key.

    Args:
        grid: rows of panels, all of one length.
        shared: whether all panels share both axes.
        width_in: None: a column's width for one column of panels, a page's for more.
    """
    size = float(matplotlib.rcParams["legend.fontsize"])
    head = float(matplotlib.rcParams["figure.titlesize"])
    panel_head = float(matplotlib.rcParams["axes.titlesize"])
    columns = max(len(row) for row in grid)
    width = width_in or (COLUMN_IN if columns == 1 else PAGE_IN)
    axes_width = (width - _LEFT - _RIGHT - (columns - 1) * _BETWEEN) / columns

    title_lines = wrapped(title, width - 2 * _INDENT, head, "bold")
    title_height = len(title_lines) * 1.3 * head / 72 + 0.08
    titles = [
        [wrapped(panel.title, axes_width + _LEFT - _INDENT, panel_head, "bold") for panel in row]
        for row in grid
    ]
    # A legend may begin under the y labels: the paper is narrow.
    legends = [[_legend(panel.entries, axes_width + _LEFT - _INDENT, size) for panel in row] for row in grid]
    key_rows = _flowed(key, width - 2 * _INDENT, size)
    key_height = sum(line.height for line in key_rows)

    row_heads = [max(len(lines) for lines in row) * 1.3 * panel_head / 72 + 0.06 for row in titles]
    row_legends = [max(legend.height for legend in row) for row in legends]
    height = _TOP + title_height + key_height + _BOTTOM
    height += sum(row_heads) + sum(row_legends) + len(grid) * (axes_height_in + _X_AXIS + _GAP)

    figure = Figure(figsize=(width, round(height, 3)))
    FigureCanvasAgg(figure)
    figure.text(
        _INDENT / width, 1 - _TOP / height, "\n".join(title_lines), va="top", fontsize=head, weight="bold"
    )
    top = height - _TOP - title_height
    axes: list[list[Axes]] = []
    first: Axes | None = None
    for row_index, row in enumerate(grid):
        bottom = top - row_heads[row_index] - axes_height_in
        drawn: list[Axes] = []
        for column, _ in enumerate(row):
            left = _LEFT + column * (axes_width + _BETWEEN)
            ax = figure.add_axes(
                (left / width, bottom / height, axes_width / width, axes_height_in / height),
                sharex=first,
                sharey=first,
            )
            if shared:
                first = first or ax
            ax.set_title("\n".join(titles[row_index][column]), x=(_INDENT - _LEFT) / axes_width)
            ax.yaxis.set_label_coords(-_LABEL / axes_width, 0.5)
            legend = legends[row_index][column]
            if legend.handles:
                figure.legend(
                    legend.handles,
                    legend.labels,
                    loc="upper left",
                    bbox_to_anchor=((left - _LEFT + _INDENT) / width, (bottom - _X_AXIS) / height),
                    ncols=legend.columns,
                )
            drawn.append(ax)
        axes.append(drawn)
        top = bottom - _X_AXIS - row_legends[row_index] - _GAP
    top = _BOTTOM + key_height
    for line in key_rows:
        figure.legend(
            line.handles,
            line.labels,
            loc="upper left",
            bbox_to_anchor=(_INDENT / width, top / height),
            ncols=line.columns,
        )
        top -= line.height
    return figure, axes
