# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.serving.stage import write_plan
from splitbench.workflow import script

with script(snakemake.log[0]):
    write_plan(
        snakemake.params.plan,
        snakemake.params.script,
        Path(snakemake.output.plan),
        Path(snakemake.output.script),
    )
