# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.figures.stage import write_one_figure
from splitbench.tables.stage import read_listing
from splitbench.workflow import Workflow, script

with script(snakemake.log[0]):
    write_one_figure(
        Workflow(snakemake.config),
        snakemake.wildcards.figure,
        read_listing(Path(snakemake.input.parts)),
        Path(snakemake.output.png).with_suffix(""),
    )
