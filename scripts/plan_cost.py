# SPDX-License-Identifier: Apache-2.0
from splitbench.measuring.estimate import estimate
from splitbench.workflow import Workflow, script

with script(snakemake.log[0]) as note:
    for line in estimate(Workflow(snakemake.config)).lines():
        note(line)
