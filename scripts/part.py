# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.tables.stage import write_cell_part
from splitbench.workflow import Workflow, script

with script(snakemake.log[0]) as note:
    write_cell_part(
        Workflow(snakemake.config), snakemake.wildcards.cell, Path(snakemake.output.cells).parent, note
    )
