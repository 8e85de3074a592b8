# SPDX-License-Identifier: Apache-2.0
# The cells. Every cell is a job of its own under the session lease: the lock of the node keeps two from running at
# once, and taking all cores keeps the workflow's other jobs out of the measurement. CELL is `{cell}` in parts, so that
# those of one session can be told.


rule cell:
    input:
        serving=ancient(rules.serving_environment.output[0]),
        environment=ancient(rules.probe.output[0]),
        check=ancient(rules.check.output[0]),
        model=ancient(rules.model.output[0]),
        again=invalid_ones_again,
    output:
        slice=flow.path(f"cells/{CELL}/cell.json"),
        bench=flow.path(f"cells/{CELL}/bench.json"),
        metrics=flow.path(f"cells/{CELL}/metrics.json"),
        facts=flow.path(f"cells/{CELL}/engine_facts.json"),
        telemetry=flow.path(f"cells/{CELL}/telemetry.json"),
        logs=flow.path(f"cells/{CELL}/logs.json.gz"),
        record=flow.path(f"cells/{CELL}/record.json"),
    log:
        flow.path(f"logs/cells/{CELL}.log"),
    priority: cell_priority
    # Only where jobs go to a cluster: profiles/slurm-jobs says how many cells of a session make one job.
    group:
        "session-{layout}-{restart}"
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
