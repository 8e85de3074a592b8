# SPDX-License-Identifier: Apache-2.0
"""The figures stage as the workflow calls it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from splitbench.errors import PARTS, damage
from splitbench.figures.gallery import Measured, draw, lineage, write_figure
from splitbench.files import digest
from splitbench.workflow import Workflow


@damage(*PARTS)
def write_one_figure(flow: Workflow, name: str, parts: Iterable[Path], stem: Path) -> None:
    """Draw a figure of the experiment from its parts and write it with its lineage.

    Raises:
        UserError: the parts lack what the figure shows.
    """
    measured = Measured.from_folders(parts)
    drawn = draw(measured, flow.figure_spec(name))
    sidecar = lineage(
        drawn,
        measured,
        experiment=flow.experiment.experiment,
        stack=flow.experiment.stack.name,
        stack_digest=digest(flow.stack),
    )
    write_figure(drawn, stem, sidecar)
