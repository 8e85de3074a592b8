# SPDX-License-Identifier: Apache-2.0
"""Figures: `draw` makes one from the tables and its spec, `write_figure` puts it on disk with its lineage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from splitbench.figures.cdf import by_concurrency, of_layouts
from splitbench.figures.curves import Drawn
from splitbench.figures.interference import timeline
from splitbench.figures.load import against_concurrency
from splitbench.figures.measured import Measured
from splitbench.figures.money import money, throughput_interactivity
from splitbench.figures.spec import FIGURE_NAMES, FigureName, FigureSpec, Window
from splitbench.figures.spread import variance_bars
from splitbench.figures.turning import break_even_lines
from splitbench.figures.watched import telemetry
from splitbench.figures.writer import lineage, spec_of, write_figure

__all__ = [
    "FIGURE_NAMES",
    "Drawn",
    "FigureName",
    "FigureSpec",
    "Measured",
    "Window",
    "draw",
    "draw_again",
    "lineage",
    "make_figure",
    "spec_of",
    "write_figure",
]

_DRAWERS: Mapping[FigureName, Callable[[Measured, FigureSpec], Drawn]] = {
    "itl_by_concurrency": lambda m, s: by_concurrency(m, s, metric="itl_ms"),
    "itl_of_layouts": lambda m, s: of_layouts(m, s, metrics=["itl_ms"]),
    "ttft_of_layouts": lambda m, s: of_layouts(m, s, metrics=["ttft_ms"]),
    "second_token_of_layouts": lambda m, s: of_layouts(m, s, metrics=["second_token_ms"]),
    "itl_tail_by_concurrency": lambda m, s: by_concurrency(m, s, metric="itl_ms", survival=True),
    "itl_tail_of_layouts": lambda m, s: of_layouts(m, s, metrics=["itl_ms"], survival=True),
    "handoff_gap_by_concurrency": lambda m, s: by_concurrency(m, s, metric="handoff_gap_ms"),
    "itl_against_concurrency": lambda m, s: against_concurrency(m, s, metric="itl_ms"),
    "ttft_against_concurrency": lambda m, s: against_concurrency(m, s, metric="ttft_ms"),
    "interference": timeline,
    "goodput": lambda m, s: money(m, s, what="goodput"),
    "cost": lambda m, s: money(m, s, what="cost"),
    "throughput_interactivity": throughput_interactivity,
    "variance_split": variance_bars,
    "break_even": break_even_lines,
    "telemetry": telemetry,
}


def draw(measured: Measured, spec: FigureSpec) -> Drawn:
    """Draw a figure. Pure: the same tables and spec give the same picture.

    Raises:
        UserError: the tables lack what the spec names.
    """
    return _DRAWERS[spec.figure](measured, spec)


def make_figure(
    folders: Iterable[Path], spec: FigureSpec, stem: Path, *, experiment: str, **lineage_facts: Any
) -> dict[str, Any]:
    """From cells' folders to the figure's files: `stem`.png, .pdf, .svg, .csv and .json.

    Args:
        folders: folders of cells, with their Parquet parts; more than the figure needs do no harm.
        spec: the figure's slice of the config.
        stem: path of the files without suffix.
        experiment: its name, for the lineage.
        lineage_facts: further JSON facts for the sidecar, as `stack_digest` or `environment_digest`.

    Returns:
        The sidecar.
    """
    measured = Measured.from_folders(folders)
    drawn = draw(measured, spec)
    return write_figure(drawn, stem, lineage(drawn, measured, experiment=experiment, **lineage_facts))


def draw_again(measured: Measured, sidecar: Mapping[str, Any]) -> Drawn:
    """Draw a figure from its sidecar: the same spec and the same cells, so the same data to the last bit."""
    return draw(measured.only(sidecar["cells"]), spec_of(sidecar))
