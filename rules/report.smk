# SPDX-License-Identifier: Apache-2.0
# The page that people open first.


rule report:
    input:
        cells=rules.tables.output.cells,
        checks=rules.tables.output.checks,
        parts=rules.tables.output.parts,
        statistics=rules.statistics.output[0],
        probe=ancient(rules.probe.output[0]),
        # Not rules.check.output: that has been marked as ancient where cells use it, and a mark stays.
        check=flow.path(f"environment/check-{flow.stack_key}.json"),
        figures=figure_files(),
        floor=floor_files,
    output:
        report(
            flow.path("report.html"),
            caption="../docs/captions/report.rst",
            category="Report",
            labels={"page": "verdict, claims, figures, cells"},
        ),
    log:
        flow.path("logs/report.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        title=flow.experiment.title,
        language=flow.experiment.language,
        config=flow.config_argument,
        check=flow.check_text(),
    script:
        "../scripts/report.py"


# Runs whenever it is asked for: what is left changes with every cell.
rule plan_cost:
    log:
        flow.path("logs/plan_cost.log"),
    localrule: True
    conda:
        "../envs/workflow.yaml"
    script:
        "../scripts/plan_cost.py"
