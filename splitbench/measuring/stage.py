# SPDX-License-Identifier: Apache-2.0
"""The measuring stage as the workflow calls it: one cell, from its id to its files."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from splitbench.cluster.allocation import allocated
from splitbench.environment.stage import checked, ensure_model, ensure_serving, environment_now
from splitbench.errors import UserError
from splitbench.experiment.cells import Cell
from splitbench.files import canonical_json, read_json, write_json
from splitbench.measuring.around import Watching
from splitbench.measuring.evidence import Check
from splitbench.measuring.floor import read_floor
from splitbench.measuring.live import CellView
from splitbench.measuring.progress import Load, Standing, clock, remaining_s
from splitbench.measuring.prompts import check_file
from splitbench.measuring.run import CellFiles, now, run_cell
from splitbench.serving.session import Owner, Places, stop
from splitbench.serving.state import state_folder
from splitbench.workflow import REPOSITORY, Workflow

# A cell that stays invalid is not the machine's mood.
TRIES = 3


def measure_cell(
    flow: Workflow,
    cell_id: str,
    *,
    environment: Path,
    check: Path | None = None,
    log: Path,
    note: Callable[[str], None],
) -> None:
    """Measure one cell of an experiment.

    Args:
        flow: the experiment.
        cell_id: which of its cells.
        environment: record of the machine and its software.
        check: what came of comparing them with what the experiment asks; asked again where that has changed since.
        log: the rule's log; the client's output goes beside it.
        note: takes lines for a person.

    Raises:
        UserError: what kept the cell from being measured.
    """
    if check is not None:
        checked(flow, environment, check, log, note)
    cell = flow.cells[cell_id]
    files = _files(flow, cell)
    owner = Owner.from_env(os.environ)
    # A results folder that moved to another machine comes without the store; both are cheap when they are there.
    serving = ensure_serving(flow, note)
    ensure_model(flow, note)
    check_cores(cell)
    dataset = _dataset(flow, cell)
    state = state_folder()
    standing = _standing(flow, cell, owner)
    note(standing.line())
    tries = TRIES if flow.experiment.on_invalid == "rerun" else 1
    for attempt in range(tries):
        run_cell(
            cell,
            files,
            order=flow.cells.order(cell_id),
            places=places(flow),
            state=state,
            owner=owner,
            log=log.with_suffix(".client.log"),
            session_logs=Path(flow.path("logs/sessions")) / cell.layout_key,
            environment=environment_now(flow, environment, serving, note),
            idle_limit_s=flow.experiment.node.idle_limit_s,
            progress=note,
            watching=_watching(flow),
            dataset=dataset,
            view=CellView(standing, state),
        )
        if flow.experiment.on_invalid == "keep":
            break
        failed = [check for check in judge(flow, cell) if check.verdict == "invalid"]
        if not failed:
            break
        reasons = "; ".join(f"{check.name}: {check.reason}" for check in failed)
        if flow.experiment.on_invalid == "stop":
            raise rejected(files, cell, reasons)
        again = "measured again" if attempt + 1 < tries else "kept, since it was measured often enough"
        note(f"the cell is invalid and {again}: {reasons}")
    if owner is not None and all(_files(flow, other).record.exists() for other in flow.cells.all):
        # Nobody will want the session again: what comes now may have the machine to itself.
        stop(state, owner=owner, reason="all cells are measured")


def judge(flow: Workflow, cell: Cell) -> list[Check]:
    """All checks of a cell that was measured, with the thresholds and percentiles of the experiment."""
    # Loaded here since the workflow reads this module whenever it is parsed.
    from splitbench.measuring.checks import all_checks
    from splitbench.measuring.recorded import evidence_of

    files, experiment = _files(flow, cell), flow.experiment
    evidence = evidence_of(
        cell,
        files,
        read_json(files.record),
        experiment.thresholds,
        percentiles=(experiment.slo.percentile,),
        pooled_cells=experiment.matrix.restarts * experiment.matrix.repeats,
        floor_rows=(read_floor(Path(flow.floor_path)) or {}).get("rows", ()),
    )
    return all_checks(evidence)


def set_aside_if_invalid(flow: Workflow, cell_id: str) -> bool:
    """Put a measured cell's files aside where its checks found it invalid, so that it is measured again.

    Returns:
        whether it was.
    """
    verdict = Path(flow.path(f"parts/{cell_id}/checks.json"))
    files = _files(flow, flow.cells[cell_id])
    if not (verdict.exists() and files.record.exists() and read_json(verdict)["verdict"] == "invalid"):
        return False
    _keep_aside(files)
    files.record.unlink()
    return True


def rejected(files: CellFiles, cell: Cell, reasons: str) -> UserError:
    """Put an invalid cell's files aside, since a failed job's outputs are deleted; what to tell the user."""
    folder = _keep_aside(files)
    started_at = read_json(files.record)["started_at"]
    status = {"status": "failed", "started_at": started_at, "ended_at": now(), "why": f"invalid: {reasons}"}
    write_json(files.status, status | {"cell_digest": cell.digest})
    return UserError(
        f"the cell is invalid: {reasons}",
        where=cell.cell_id,
        mend=f"its files are in {folder}; on_invalid=keep goes on with such a cell marked",
    )


def _keep_aside(files: CellFiles) -> Path:
    folder = files.folder / "rejected"
    folder.mkdir(exist_ok=True)
    kept = (files.slice, files.bench, files.metrics, files.engine_facts, files.telemetry, files.logs)
    for path in (*kept, files.record):
        shutil.copy2(path, folder / path.name)
    return folder


def _dataset(flow: Workflow, cell: Cell) -> Path | None:
    workload = flow.experiment.workloads[cell.workload]
    if workload.path is None or workload.sha256 is None:
        return None
    path = (flow.root / workload.path).resolve()
    check_file(path, workload.sha256, f"workloads.{cell.workload}")
    return path


def _watching(flow: Workflow) -> Watching:
    loads = [cell.load for cell in flow.cells.all]
    return Watching(
        telemetry=flow.experiment.node.telemetry,
        thresholds=flow.experiment.thresholds,
        longest=max(int(load["input_tokens"]) + int(load["output_tokens"]) for load in loads),
    )


def places(flow: Workflow) -> Places:
    """Interpreters and folders of this machine that fill an experiment's plans."""
    return Places(
        serving_python=flow.serving_python,
        workflow_python=Path(sys.executable),
        repository=REPOSITORY,
        model=flow.model_source,
        nodes=allocated(max(plan.nodes for plan in flow.cells.plans.values())),
    )


def check_cores(cell: Cell) -> None:
    """Make sure that this process may use the cores a layout wants.

    Raises:
        UserError: a core is not there (or not ours, in a container or an allocation).
    """
    if cell.plan.budget.kind != "cores":
        return
    available = os.sched_getaffinity(0)
    for engine in (engine for engine in cell.plan.engines if not engine.node):
        missing = sorted(set(engine.devices) - available)
        if missing:
            raise UserError(
                f"{engine.name} wants core {missing[0]}, but this process may only use {sorted(available)}",
                where=f"layouts.{cell.layout}",
                mend="name cores that are there",
            )


def outlook(flow: Workflow) -> str | None:
    """What a run is about to measure and about how long that takes, from all cells that the results hold.

    Returns:
        one line; None when no cell is to be measured.
    """
    todo = [cell for cell in flow.cells.all if not is_measured(flow, cell)]
    if not todo:
        return None
    done, stacks = measured_before(flow)
    left_s = remaining_s([load_of(cell) for cell in todo], done)
    line = f"{len(todo)} of {len(flow.cells)} cells are to be measured"
    if left_s is not None:
        line += f", about {clock(left_s)} by the cells measured before"
    if stacks and canonical_json(flow.stack) not in stacks:
        line += "; the serving stack is another one than theirs, so all of them count anew"
    return line


def last_word(flow: Workflow) -> str | None:
    """Where to look now, for the end of a run that made the report; None for one that did not."""
    report = Path(flow.path("report.html"))
    if not report.exists() or report.stat().st_mtime < psutil.Process().create_time():
        return None
    return f"done; open {report}"


def measured_before(flow: Workflow) -> tuple[dict[Load, float], set[str]]:
    """Seconds of every cell that the results hold, of earlier versions of the config too, and their stacks."""
    done: dict[Load, float] = {}
    stacks = set()
    for path in Path(flow.path("cells")).glob("*/*/*/*/record.json"):
        record, cell = read_json(path), read_json(path.with_name("cell.json"))
        load = Load(
            cell["layout"]["name"],
            cell["workload"]["name"],
            cell["concurrency"],
            record["prompts"] + record["warmups"],
        )
        done[load] = float(record["total_s"])
        stacks.add(canonical_json(cell["layout"]["stack"]))
    return done, stacks


def load_of(cell: Cell) -> Load:
    """What decides how long a cell takes."""
    return Load(cell.layout, cell.workload, cell.concurrency, cell.prompts + cell.warmups)


def is_measured(flow: Workflow, cell: Cell) -> bool:
    """Whether the results hold this cell."""
    return _files(flow, cell).record.exists()


def _files(flow: Workflow, cell: Cell) -> CellFiles:
    return CellFiles(Path(flow.path(f"cells/{cell.cell_id}")))


def _standing(flow: Workflow, cell: Cell, owner: Owner | None) -> Standing:
    done: dict[Load, float] = {}
    later = []
    for other in flow.cells.all:
        record = _files(flow, other).record
        if record.exists():
            done[load_of(other)] = float(read_json(record)["total_s"])
        elif other is not cell:
            later.append(load_of(other))
    try:
        elapsed_s = time.time() - psutil.Process(owner.pid if owner else None).create_time()
    except psutil.Error:
        elapsed_s = 0.0
    matrix = flow.experiment.matrix
    several = matrix.restarts > 1 or matrix.repeats > 1
    return Standing(
        position=len(flow.cells) - len(later),
        total=len(flow.cells),
        load=load_of(cell),
        repeat=f"restart {cell.restart + 1} repeat {cell.repeat + 1}" if several else "",
        elapsed_s=elapsed_s,
        later=later,
        done=done,
    )
