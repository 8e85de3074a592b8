# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.measuring.stage import measure_cell
from splitbench.workflow import Workflow, cell_id, script

with script(snakemake.log[0]) as note:
    measure_cell(
        Workflow(snakemake.config),
        cell_id(snakemake.wildcards),
        environment=Path(snakemake.input.environment),
        check=Path(snakemake.input.check),
        log=Path(snakemake.log[0]),
        note=note,
    )
