# SPDX-License-Identifier: Apache-2.0
"""A figure that says why there is nothing in it: invalid cells must not fail a whole run."""

from __future__ import annotations

import matplotlib
import pandas as pd

from splitbench.figures.curves import Drawn
from splitbench.figures.sheet import COLUMN_IN, Panel, sheet, wrapped
from splitbench.figures.spec import FigureSpec
from splitbench.figures.style import styled


def nothing(
    spec: FigureSpec, title: str, why: str, cells: tuple[str, ...] = (), invalid: tuple[str, ...] = ()
) -> Drawn:
    """An empty figure with the reason on it.

    Args:
        spec: what was asked for.
        title: of the figure.
        why: one sentence.
        cells: those that it would have shown.
        invalid: the invalid ones among them.
    """
    with styled():
        figure, ((ax,),) = sheet([[Panel("")]], title=spec.title or title, axes_height_in=0.5)
        ax.set_axis_off()
        size = float(matplotlib.rcParams["legend.fontsize"])
        text = "\n".join(wrapped(why, COLUMN_IN - 0.9, size))
        ax.text(0, 0.95, text, transform=ax.transAxes, va="top", fontsize=size)
    return Drawn(figure, spec, pd.DataFrame({"what": ["nothing"], "reason": [why]}), why, cells, invalid)
