# SPDX-License-Identifier: Apache-2.0
# Results that travel with a paper: one zip that anyone can check without a GPU. Wanted by name only.


rule archive:
    input:
        report=rules.report.output[0],
        plans=plan_files(),
        cells=cell_files(),
    output:
        flow.path(f"{flow.experiment.experiment}.zip"),
    log:
        flow.path("logs/archive.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        config=flow.config_argument,
        files=[str(name) for name in flow.files],
    script:
        "../scripts/archive.py"
