# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.environment.stage import write_check
from splitbench.workflow import Workflow, script

with script(snakemake.log[0]) as note:
    write_check(
        Workflow(snakemake.config),
        Path(snakemake.input.probe),
        Path(snakemake.output[0]),
        Path(snakemake.log[0]),
        note,
    )
