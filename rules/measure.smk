# SPDX-License-Identifier: Apache-2.0
# The cells. Every cell is a job of its own under the session lease: the lock of the node keeps two from running at
# once, and taking all cores keeps the workflow's other jobs out of the measurement.


rule cell:
    input:
        serving=ancient(rules.serving_environment.output[0]),
        environment=ancient(rules.probe.output[0]),
        check=ancient(rules.check.output[0]),
        model=ancient(rules.model.output[0]),
        again=invalid_ones_again,
    output:
        slice=flow.path("cells/{cell}/cell.json"),
        bench=flow.path("cells/{cell}/bench.json"),
        metrics=flow.path("cells/{cell}/metrics.json"),
        facts=flow.path("cells/{cell}/engine_facts.json"),
        telemetry=flow.path("cells/{cell}/telemetry.json"),
        logs=flow.path("cells/{cell}/logs.json.gz"),
        record=flow.path("cells/{cell}/record.json"),
    log:
        flow.path("logs/cells/{cell}.log"),
    priority: cell_priority
    conda:
        "../envs/workflow.yaml"
    threads: workflow.cores
    resources:
        node=1,
    params:
        slice=cell_slice,
    script:
        "../scripts/cell.py"


rule cells:
    input:
        cell_files(),
    localrule: True
    conda:
        "../envs/workflow.yaml"


# One small cell of every layout with its checks: a quarter of an hour that may save a night.
rule first:
    input:
        first_cell_files(),
    localrule: True
    conda:
        "../envs/workflow.yaml"
