# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from splitbench.environment.stage import write_probe
from splitbench.workflow import script

with script(snakemake.log[0]):
    write_probe(Path(snakemake.input.serving), Path(snakemake.output[0]))
