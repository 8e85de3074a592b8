# SPDX-License-Identifier: Apache-2.0
# What would be started, readable without starting it.


rule plan:
    output:
        plan=flow.path("plans/{layout}.json"),
        script=flow.path("plans/{layout}.sh"),
    log:
        flow.path("logs/plans/{layout}.log"),
    localrule: True
    conda:
        "../envs/workflow.yaml"
    params:
        plan=plan_of,
        script=plan_script_of,
    script:
        "../scripts/plan.py"


rule plans:
    input:
        plan_files(),
    localrule: True
    conda:
        "../envs/workflow.yaml"
