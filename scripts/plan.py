# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

from splitbench.files import write_json
from splitbench.workflow import script

with script(snakemake.log[0]):
    write_json(Path(snakemake.output[0]), json.loads(snakemake.params.plan))
