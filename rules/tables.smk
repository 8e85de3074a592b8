# SPDX-License-Identifier: Apache-2.0
# From the client's JSON to checked Parquet: one part per cell, then the small tables over all cells.


rule part:
    input:
        slice=flow.path("cells/{cell}/cell.json"),
        bench=flow.path("cells/{cell}/bench.json"),
        metrics=flow.path("cells/{cell}/metrics.json"),
        facts=flow.path("cells/{cell}/engine_facts.json"),
        telemetry=flow.path("cells/{cell}/telemetry.json"),
        logs=flow.path("cells/{cell}/logs.json.gz"),
        record=flow.path("cells/{cell}/record.json"),
        floor=floor_files,
    output:
        cells=flow.path("parts/{cell}/cell.parquet"),
        requests=flow.path("parts/{cell}/requests.parquet"),
        tokens=flow.path("parts/{cell}/tokens.parquet"),
        checks=flow.path("parts/{cell}/checks.parquet"),
        facts=flow.path("parts/{cell}/engine_facts.parquet"),
        telemetry=flow.path("parts/{cell}/telemetry.parquet"),
        verdict=flow.path("parts/{cell}/checks.json"),
    log:
        flow.path("logs/parts/{cell}.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        slice=cell_slice,
        thresholds=flow.section("thresholds"),
        asked=flow.asked_percentiles,
    script:
        "../scripts/part.py"


rule tables:
    input:
        cells=all_cells("parts/{cell}/cell.parquet"),
        requests=all_cells("parts/{cell}/requests.parquet"),
        tokens=all_cells("parts/{cell}/tokens.parquet"),
        checks=all_cells("parts/{cell}/checks.parquet"),
        facts=all_cells("cells/{cell}/engine_facts.json"),
    output:
        cells=flow.path("tables/cells.parquet"),
        checks=flow.path("tables/checks.parquet"),
        parts=flow.path("tables/parts.json"),
        symmetry=flow.path("tables/symmetry.json"),
    log:
        flow.path("logs/tables.log"),
    conda:
        "../envs/workflow.yaml"
    script:
        "../scripts/tables.py"


rule statistics:
    input:
        cells=rules.tables.output.cells,
        checks=rules.tables.output.checks,
        parts=rules.tables.output.parts,
        symmetry=rules.tables.output.symmetry,
    output:
        flow.path("statistics.json"),
    log:
        flow.path("logs/statistics.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        slo=flow.section("slo"),
        margin_percent=flow.section("margin_percent"),
        claims=flow.section("claims"),
    script:
        "../scripts/statistics.py"
