# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.environment.stage import checked
from splitbench.report.stage import write_page
from splitbench.tables.stage import read_listing
from splitbench.workflow import Workflow, script

with script(snakemake.log[0]) as note:
    flow, probe, check = Workflow(snakemake.config), Path(snakemake.input.probe), Path(snakemake.input.check)
    checked(flow, probe, check, Path(snakemake.log[0]), note)
    write_page(
        flow,
        read_listing(Path(snakemake.input.parts)),
        probe,
        check,
        Path(snakemake.input.statistics),
        snakemake.params.config,
        Path(snakemake.output[0]),
    )
