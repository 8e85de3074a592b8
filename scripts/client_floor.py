# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.measuring.selftest import floor_or_why
from splitbench.workflow import Workflow, script

with script(snakemake.log[0]) as note:
    floor_or_why(Workflow(snakemake.config), Path(snakemake.output[0]), note, snakemake.params.streams)
