# SPDX-License-Identifier: Apache-2.0
"""The tables stage as the workflow calls it: a cell's files to its checked parts, and the small tables over all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from splitbench.experiment.cells import Cell
from splitbench.experiment.models import Thresholds
from splitbench.files import digest, read_json, write_json, written_aside
from splitbench.measuring.checks import Check, EngineEvidence, Evidence, all_checks, worst
from splitbench.measuring.run import CellFiles
from splitbench.serving.facts import fact_rows
from splitbench.tables.ingest import ingest_cell
from splitbench.tables.parts import write_part
from splitbench.workflow import Workflow


def write_cell_part(flow: Workflow, cell_id: str, folder: Path) -> None:
    """Check one cell and write its parts of the tables into a folder.

    Raises:
        UserError: the client's file can't be read; the line names it and the place.
    """
    cell = flow.cells[cell_id]
    files = CellFiles(Path(flow.path(f"cells/{cell_id}")))
    record = read_json(files.record)
    evidence = evidence_of(cell, files, record, flow.experiment.thresholds)
    checks = all_checks(evidence)
    row = cell_row(cell, record) | {"verdict": worst(checks), "stack": flow.experiment.stack.name}
    ingest_cell(files.bench, row, folder)
    write_part("checks", [_check_row(check) for check in checks], folder, row)
    write_part("engine_facts", fact_rows(read_json(files.engine_facts)), folder, row)


def evidence_of(cell: Cell, files: CellFiles, record: dict[str, Any], thresholds: Thresholds) -> Evidence:
    """What the checks of a cell look at."""
    metrics = read_json(files.metrics)
    return Evidence(
        kind=cell.plan.kind,
        prompts=cell.prompts,
        input_tokens=int(cell.load["input_tokens"]),
        output_tokens=int(cell.load["output_tokens"]),
        concurrency=cell.concurrency,
        warmups=int(record["warmups"]),
        warmup_seed_differs=record["warmup_seed"] != record["seed"],
        bench=orjson.loads(files.bench.read_bytes().replace(b"Infinity", b"null").replace(b"NaN", b"null")),
        engines={
            name: EngineEvidence(role=found["role"], before=found["before"], after=found["after"])
            for name, found in metrics.items()
        },
        thresholds=thresholds,
    )


def cell_row(cell: Cell, record: dict[str, Any]) -> dict[str, Any]:
    """What the run itself knows of a row of the cells table."""
    plan = cell.plan
    return {
        "cell_id": cell.cell_id,
        "experiment": cell.experiment,
        "layout": cell.layout,
        "kind": plan.kind,
        "connector": plan.connector,
        "first_token": plan.first_token,
        "budget_kind": plan.budget.kind,
        "budget": plan.budget.count,
        "share": plan.budget.share,
        "workload": cell.workload,
        "input_tokens_asked": int(cell.load["input_tokens"]),
        "output_tokens_asked": int(cell.load["output_tokens"]),
        "concurrency": cell.concurrency,
        "restart": cell.restart,
        "repeat": cell.repeat,
        "seed": cell.seed,
        "order_number": record["order"],
        "session_id": record["session"]["id"],
        "session_age_s": record["session"]["age_s"],
        "started_at": pa.scalar(record["started_at"]).cast(pa.timestamp("us", tz="UTC")).as_py(),
        "requests_asked": cell.prompts,
        "plan_digest": cell.plan_digest,
        "workload_digest": digest(cell.workload_slice),
        "cell_digest": cell.digest,
        "stack_digest": digest(dict(cell.stack)),
        "environment_digest": record["environment_digest"],
        "client": "vllm bench serve",
        "code_version": record["code_version"],
    }


def _check_row(check: Check) -> dict[str, Any]:
    numbers = {name: float(value) for name, value in check.figures.items() if isinstance(value, int | float)}
    return {"check": check.name, "outcome": check.verdict, "reason": check.reason, "figures": numbers}


def write_tables(parts: Iterable[Path], cells: Path, checks: Path, listing: Path) -> None:
    """Gather the small tables of all parts, and list the parts that the large ones are read from.

    Args:
        parts: folders of the experiment's cells, in its order.
        cells: where the cells table goes.
        checks: where the checks table goes.
        listing: JSON with the folders, relative to where the workflow runs.
    """
    folders = list(parts)
    for name, path in (("cell.parquet", cells), ("checks.parquet", checks)):
        gathered = pa.concat_tables(
            [pq.read_table(folder / name).replace_schema_metadata() for folder in folders]
        )
        with written_aside(path) as aside:
            pq.write_table(gathered, aside)
    write_json(listing, {"parts": [str(folder) for folder in folders]})


def read_listing(listing: Path) -> list[Path]:
    """The folders that `write_tables` listed."""
    return [Path(folder) for folder in read_json(listing)["parts"]]
