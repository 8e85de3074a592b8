# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.environment.stage import write_probe
from splitbench.workflow import Workflow, script

with script(snakemake.log[0]) as note:
    write_probe(Workflow(snakemake.config), Path(snakemake.input.serving), Path(snakemake.output[0]), note)
