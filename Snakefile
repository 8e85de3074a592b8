# SPDX-License-Identifier: Apache-2.0
# Reads the config, includes the rules, names the targets; everything else is in rules/ and splitbench/.

from snakemake.utils import min_version

min_version("9.27")

# An experiment given by --configfile stands alone; the default must not leak its layouts into it.
if "experiment" not in config:

    configfile: "config/config.yaml"


report: "docs/workflow.rst"


include: "rules/common.smk"
include: "rules/environment.smk"
include: "rules/plans.smk"
include: "rules/measure.smk"
include: "rules/tables.smk"
include: "rules/figures.smk"
include: "rules/report.smk"
include: "rules/archive.smk"


rule all:
    default_target: True
    input:
        flow.path("report.html"),
        figure_files(),
        plan_files(),
        # Raw results are wanted for themselves: the tables alone would not bring a deleted one back.
        cell_files(),
    localrule: True
    conda:
        "envs/workflow.yaml"
