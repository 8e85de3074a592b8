# SPDX-License-Identifier: Apache-2.0
# The software and the machine, before anything is measured.


rule serving_environment:
    output:
        flow.path(f"environment/serving-{flow.stack_key}.json"),
    log:
        flow.path(f"logs/environment/serving-{flow.stack_key}.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        # What is expected of it does not change how it is made.
        stack=flow.section("stack", without=frozenset({"expects"})),
    script:
        "../scripts/serving_environment.py"


rule probe:
    input:
        serving=ancient(rules.serving_environment.output[0]),
    output:
        flow.path(f"environment/probe-{flow.stack_key}.json"),
    log:
        flow.path(f"logs/environment/probe-{flow.stack_key}.log"),
    conda:
        "../envs/workflow.yaml"
    script:
        "../scripts/probe.py"


# Early, so that a machine that does not fit costs a minute and not the night. What is asked of the machine is no
# parameter: Snakemake looks at no job below one that it will run, so that a question asked anew would hide every other
# edit for a run (`ancient` keeps the cells from running, and from being looked at). Cells and report ask again instead.
rule check:
    input:
        probe=rules.probe.output[0],
    output:
        flow.path(f"environment/check-{flow.stack_key}.json"),
    log:
        flow.path(f"logs/environment/check-{flow.stack_key}.log"),
    conda:
        "../envs/workflow.yaml"
    script:
        "../scripts/check.py"


rule model:
    output:
        flow.path(f"models/{flow.model_key}.json"),
    log:
        flow.path(f"logs/models/{flow.model_key}.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        model=flow.section("model"),
    script:
        "../scripts/model.py"


# What the client itself adds to latencies, on an otherwise idle machine: before the first session is up.
rule client_floor:
    input:
        serving=ancient(rules.serving_environment.output[0]),
        model=ancient(rules.model.output[0]),
    output:
        flow.floor_path,
    log:
        flow.path(f"logs/environment/client-{flow.stack_key}.log"),
    priority: len(flow.cells) + 1
    conda:
        "../envs/workflow.yaml"
    threads: workflow.cores
    resources:
        node=1,
    params:
        streams=list(flow.experiment.node.selftest_streams),
    script:
        "../scripts/client_floor.py"
