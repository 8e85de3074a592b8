# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.archive.build import build_archive
from splitbench.workflow import Workflow, script

with script(snakemake.log[0]) as note:
    build_archive(
        Workflow(snakemake.config, [Path(name) for name in snakemake.params.files]),
        snakemake.config,
        snakemake.params.config,
        Path(snakemake.output[0]),
        note,
    )
