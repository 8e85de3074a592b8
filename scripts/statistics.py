# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

from splitbench.files import read_json
from splitbench.statistics.stage import write_statistics
from splitbench.tables.stage import read_listing
from splitbench.workflow import script

with script(snakemake.log[0]):
    write_statistics(
        Path(snakemake.input.cells),
        read_listing(Path(snakemake.input.parts)),
        json.loads(snakemake.params.slo),
        Path(snakemake.output[0]),
        margin_percent=json.loads(snakemake.params.margin_percent),
        claims=json.loads(snakemake.params.claims),
        asymmetries=read_json(Path(snakemake.input.symmetry))["differences"],
    )
