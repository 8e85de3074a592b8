# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.tables.stage import write_symmetry, write_tables
from splitbench.workflow import Workflow, script

with script(snakemake.log[0]):
    write_tables(
        [Path(name).parent for name in snakemake.input.cells],
        cells=Path(snakemake.output.cells),
        checks=Path(snakemake.output.checks),
        listing=Path(snakemake.output.parts),
    )
    write_symmetry(Workflow(snakemake.config), Path(snakemake.output.symmetry))
