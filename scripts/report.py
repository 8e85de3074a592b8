# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.report.stage import write_page
from splitbench.tables.stage import read_listing
from splitbench.workflow import Workflow, script

with script(snakemake.log[0]):
    write_page(
        Workflow(snakemake.config),
        read_listing(Path(snakemake.input.parts)),
        Path(snakemake.input.probe),
        Path(snakemake.input.check),
        Path(snakemake.input.statistics),
        snakemake.params.config,
        Path(snakemake.output[0]),
    )
