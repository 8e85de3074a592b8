# SPDX-License-Identifier: Apache-2.0
"""The tables stage as the workflow calls it: a cell's files to its checked parts, and the small tables over all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from splitbench.errors import PARTS, damage
from splitbench.experiment.cells import Cell
from splitbench.files import digest, read_json, write_json, written_aside
from splitbench.measuring.checks import Check, worst
from splitbench.measuring.evidence import Series
from splitbench.measuring.recorded import telemetry_of
from splitbench.measuring.run import CellFiles
from splitbench.measuring.stage import judge
from splitbench.measuring.symmetry import differences, facts_of, symmetry
from splitbench.serving.facts import fact_rows
from splitbench.tables.ingest import ingest_cell
from splitbench.tables.parts import write_part
from splitbench.workflow import Workflow


def write_cell_part(
    flow: Workflow, cell_id: str, folder: Path, note: Callable[[str], None] | None = None
) -> None:
    """Check one cell and write its parts of the tables, and `checks.json`, into a folder.

    Args:
        flow: the experiment.
        cell_id: which of its cells.
        folder: where the parts go.
        note: told in one line when the cell is invalid, and why.

    Raises:
        UserError: the client's file can't be read; the line names it and the place.
    """
    files = CellFiles(Path(flow.path(f"cells/{cell_id}")))
    with damage(str(files.folder), "delete this folder, and the cell is measured again"):
        checks = _write_cell_part(flow, cell_id, files, folder)
    failed = [f"{check.name}: {check.reason}" for check in checks if check.verdict == "invalid"]
    if failed and note is not None:
        note(f"{cell_id} is invalid and left out of every verdict ({'; '.join(failed)})")


def _write_cell_part(flow: Workflow, cell_id: str, files: CellFiles, folder: Path) -> list[Check]:
    cell = flow.cells[cell_id]
    record = read_json(files.record)
    checks = judge(flow, cell)
    row = cell_row(cell, record) | {"verdict": worst(checks), "stack": flow.experiment.stack.name}
    ingest_cell(files.bench, row, folder)
    write_part("checks", [_check_row(check) for check in checks], folder, row)
    write_part("engine_facts", fact_rows(read_json(files.engine_facts)), folder, row)
    _, series = telemetry_of(files)
    write_part("telemetry", _telemetry_rows(series), folder, row)
    write_json(
        folder / "checks.json",
        {"cell_id": cell_id, "verdict": worst(checks), "checks": [check.as_dict() for check in checks]},
    )
    return checks


def _telemetry_rows(series: Iterable[Series]) -> list[dict[str, Any]]:
    return [
        {"time_s": float(time_s), "source": one.source, "metric": one.metric, "value": float(value)}
        for one in series
        for time_s, value in zip(one.times_s, one.values, strict=True)
    ]


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
        "node": record.get("node", {}).get("label"),
        "client": "vllm bench serve",
        "code_version": record["code_version"],
    }


def _check_row(check: Check) -> dict[str, Any]:
    numbers = {name: float(value) for name, value in check.figures.items() if isinstance(value, int | float)}
    return {
        "check": check.name,
        "outcome": check.verdict,
        "reason": check.reason,
        "figures": numbers,
        "thresholds": check.limits,
    }


def write_symmetry(flow: Workflow, output: Path) -> None:
    """Compare what engines say of themselves between the layouts of each budget, and write what differs.

    The facts of a layout are those of its first measured cell; a layout that was not measured is left out.
    """
    arms: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for cell in flow.cells.all:
        files = CellFiles(Path(flow.path(f"cells/{cell.cell_id}")))
        of_budget = arms.setdefault(str(cell.plan.budget), {})
        if cell.layout not in of_budget and files.engine_facts.exists():
            of_budget[cell.layout] = facts_of(read_json(files.engine_facts))
    compared = {budget: layouts for budget, layouts in arms.items() if len(layouts) > 1}
    write_json(
        output,
        {
            "budgets": {budget: symmetry(layouts).as_dict() for budget, layouts in compared.items()},
            "differences": [
                asdict(each) | {"reason": each.reason}
                for layouts in compared.values()
                for each in differences(layouts)
            ],
        },
    )


@damage(*PARTS)
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


@damage(*PARTS)
def read_listing(listing: Path) -> list[Path]:
    """The folders that `write_tables` listed."""
    return [Path(folder) for folder in read_json(listing)["parts"]]
