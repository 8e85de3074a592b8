# SPDX-License-Identifier: Apache-2.0
# What would be started, readable without starting it.


def plan_of(wildcards):
    return flow.plan_text(wildcards.layout)


def plan_files():
    return [flow.path(f"plans/{layout}.json") for layout in flow.experiment.layouts]


rule plan:
    output:
        flow.path("plans/{layout}.json"),
    log:
        flow.path("logs/plans/{layout}.log"),
    params:
        plan=plan_of,
    localrule: True
    conda:
        "../envs/workflow.yaml"
    script:
        "../scripts/plan.py"


rule plans:
    input:
        plan_files(),
    localrule: True
    conda:
        "../envs/workflow.yaml"
