# SPDX-License-Identifier: Apache-2.0
# The page that people open first.


rule report:
    input:
        cells=rules.tables.output.cells,
        checks=rules.tables.output.checks,
        parts=rules.tables.output.parts,
        statistics=rules.statistics.output[0],
        probe=ancient(rules.probe.output[0]),
        check=rules.check.output[0],
        figures=figure_files(),
    output:
        flow.path("report.html"),
    log:
        flow.path("logs/report.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        title=flow.experiment.title,
        config=flow.config_argument,
    script:
        "../scripts/report.py"
