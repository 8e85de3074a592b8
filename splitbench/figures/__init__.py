# SPDX-License-Identifier: Apache-2.0
"""Figures: `draw` makes one from the tables and its spec, `write_figure` puts it on disk with its lineage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from splitbench.figures.cdf import by_concurrency, of_layouts
from splitbench.figures.curves import Drawn
from splitbench.figures.interference import timeline
from splitbench.figures.load import against_concurrency
from splitbench.figures.measured import Measured
from splitbench.figures.spec import FIGURE_NAMES, FigureName, FigureSpec, Window
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
    "itl_against_concurrency": lambda m, s: against_concurrency(m, s, metric="itl_ms"),
    "ttft_against_concurrency": lambda m, s: against_concurrency(m, s, metric="ttft_ms"),
    "interference": timeline,
}


def draw(measured: Measured, spec: FigureSpec) -> Drawn:
    """Draw a figure. Pure: the same tables and spec give the same picture.

    Raises:
        UserError: the tables lack what the spec names.
    """
    return _DRAWERS[spec.figure](measured, spec)


def draw_again(measured: Measured, sidecar: Mapping[str, Any]) -> Drawn:
    """Draw a figure from its sidecar: the same spec and the same cells, so the same data to the last bit."""
    return draw(measured.only(sidecar["cells"]), spec_of(sidecar))
