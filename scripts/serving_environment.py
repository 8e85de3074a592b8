# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.environment.stage import write_serving
from splitbench.workflow import Workflow, script

with script(snakemake.log[0]) as note:
    write_serving(
        Workflow(snakemake.config),
        Path(snakemake.output[0]),
        Path(snakemake.log[0]).with_suffix(".installer.log"),
        note,
    )
