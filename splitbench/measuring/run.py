# SPDX-License-Identifier: Apache-2.0
"""Measure one cell: take the node, get the session, warm up, run the client, keep what proves the numbers."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from splitbench import __version__
from splitbench.cluster.node import node_now
from splitbench.environment.probe import environment_digest
from splitbench.errors import UserError
from splitbench.experiment.cells import Cell
from splitbench.files import digest, read_json, sha256_file, write_json, written_aside
from splitbench.measuring.around import Around, SessionNotes, Watching
from splitbench.measuring.client import ClientExit, client_env, prompts_file, run_warm, ticks_file
from splitbench.measuring.command import bench_command
from splitbench.measuring.live import CellView
from splitbench.measuring.prompts import write_prompts_of_lines
from splitbench.measuring.scrape import reset_prefix_caches, scrape, servers
from splitbench.serving import facts
from splitbench.serving.session import ClientPlan, Owner, Places, Session, SessionRequest, acquire
from splitbench.serving.state import node_lock

# Any fixed offset keeps warm-up prompts apart from measured ones and the same in every layout.
WARMUP_SEED_OFFSET = 0x40000000


@dataclass(frozen=True)
class CellFiles:
    """Where a cell's files go; `status` is kept when the cell fails, the others only exist when it is complete."""

    folder: Path

    @property
    def slice(self) -> Path:
        """The effective slice and its digest."""
        return self.folder / "cell.json"

    @property
    def bench(self) -> Path:
        """The client's detailed result."""
        return self.folder / "bench.json"

    @property
    def metrics(self) -> Path:
        """Engines' counters before and after."""
        return self.folder / "metrics.json"

    @property
    def engine_facts(self) -> Path:
        """What every engine of the cell's session said about itself."""
        return self.folder / "engine_facts.json"

    @property
    def telemetry(self) -> Path:
        """Samples of processes, processors and GPUs."""
        return self.folder / "telemetry.json"

    @property
    def logs(self) -> Path:
        """What engines wrote until they were ready, and during the cell."""
        return self.folder / "logs.json.gz"

    @property
    def record(self) -> Path:
        """What happened: times, order, session, client."""
        return self.folder / "record.json"

    @property
    def status(self) -> Path:
        """Started, completed or failed, and why."""
        return self.folder / "status.json"


def now() -> str:
    """UTC time to the millisecond, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def run_cell(
    cell: Cell,
    files: CellFiles,
    *,
    order: int,
    places: Places,
    state: Path,
    owner: Owner | None,
    log: Path,
    session_logs: Path,
    environment: Path,
    idle_limit_s: float,
    progress: Callable[[str], None],
    watching: Watching | None = None,
    dataset: Path | None = None,
    view: CellView | None = None,
) -> None:
    """Measure a cell under the node's lock and write its files aside, then in place, the record last.

    Args:
        cell: what to measure.
        files: where results go.
        order: the cell's place in the planned order, from 0.
        places: interpreters and folders of this machine.
        state: this node's state folder.
        owner: the process for which sessions are kept up; None: nobody, they stay until they are idle.
        log: the client's output.
        session_logs: folder of the engines' logs.
        environment: record of the machine and its software; its digest goes into the cell's record.
        idle_limit_s: a session that nobody uses ends after this.
        progress: takes one line for a person.
        watching: how the cell is watched; None: as is usual.
        dataset: the file of the workload's dataset, where it is one.
        view: shows how far the cell is.

    Raises:
        UserError: the session did not come up, failed its smoke test, was lost, or the client failed.
    """
    started_at = now()
    write_json(files.status, {"status": "started", "started_at": started_at, "cell_digest": cell.digest})
    try:
        with node_lock(state, f"{cell.experiment}: {cell.cell_id}", progress, owner=owner):
            _measure(
                cell,
                files,
                order=order,
                request=SessionRequest(
                    plan=cell.plan,
                    restart=cell.restart,
                    places=places,
                    log_folder=session_logs,
                    owner=owner,
                    client=_client(places),
                    stack=digest(dict(cell.stack)),
                    idle_limit_s=idle_limit_s,
                ),
                log=log,
                environment=environment,
                progress=progress,
                state=state,
                watching=watching or Watching(),
                dataset=dataset,
                view=view,
            )
    except BaseException as error:
        failed = {"status": "failed", "started_at": started_at, "ended_at": now(), "why": str(error)}
        with suppress(OSError):  # on a full disk the reason for it says more
            write_json(files.status, failed | {"cell_digest": cell.digest})
        raise
    write_json(
        files.status,
        {"status": "completed", "started_at": started_at, "ended_at": now(), "cell_digest": cell.digest},
    )


def _client(places: Places) -> ClientPlan:
    script = places.repository / "splitbench" / "measuring" / "client_server.py"
    return ClientPlan(argv=("{serving_python}", str(script), "{client_socket}"), env=client_env(places.model))


def _measure(
    cell: Cell,
    files: CellFiles,
    *,
    order: int,
    request: SessionRequest,
    log: Path,
    environment: Path,
    progress: Callable[[str], None],
    state: Path,
    watching: Watching,
    dataset: Path | None,
    view: CellView | None,
) -> None:
    with acquire(request, progress, state=state) as session, view or nullcontext():
        began = time.monotonic()

        def lost() -> str | None:
            if request.owner is not None and not request.owner.alive():
                return "the workflow that asked for this cell is gone"
            return session.lost()

        files.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".cell-", dir=files.folder) as aside:
            raw = Path(aside).absolute() / "bench.json"
            prompts = _prompts(cell, dataset, raw.with_name("prompts.jsonl"))
            notes = SessionNotes(session)
            smoke = notes.smoke(cell, session, watching, progress)
            around = Around(cell, session, watching, request.owner.pid if request.owner else None)
            reset_prefix_caches(session)
            warmup_seed = cell.seed ^ WARMUP_SEED_OFFSET
            client = _Client(session, cell, request.places.model, log, lost, view)
            warmup_client_s = 0.0
            if cell.warmups:
                warmup_client_s = client.run(cell.warmups, warmup_seed, None)[1].seconds
            before = scrape(session)
            session_age_s = session.age_s
            around.begin()
            # The client's own clock: on Linux perf_counter is one clock for all processes.
            started_at, start = now(), time.perf_counter()
            argv, ended = client.run(
                cell.prompts, cell.seed, raw, started=around.client_started, dataset=prompts
            )
            duration_s = time.perf_counter() - start
            after = scrape(session)
            telemetry, logs = around.end(notes, ticks_file(log))
            if reason := lost() or session.confirm():
                raise UserError(f"the cell was lost: {reason}", mend="see the engines' logs, then run again")
            bench = _read_bench(raw, log)
            write_json(files.slice, cell.slice | {"digest": cell.digest, "experiment": cell.experiment})
            with written_aside(files.bench) as path:
                path.write_bytes(raw.read_bytes())
            with written_aside(files.logs) as path:
                path.write_bytes(logs)
        write_json(files.telemetry, telemetry | {"clock_start_s": start})
        write_json(
            files.metrics,
            {
                server.name: {"role": server.role, "before": before[server.name], "after": after[server.name]}
                for server in servers(session)
                if server.name in before and server.name in after
            },
        )
        write_json(files.engine_facts, _engine_facts(session))
        write_json(
            files.record,
            {
                "cell_id": cell.cell_id,
                "cell_digest": cell.digest,
                "order": order,
                "started_at": started_at,
                "ended_at": now(),
                "duration_s": round(duration_s, 3),
                "total_s": round(time.monotonic() - began, 3),
                "prompts": cell.prompts,
                "warmups": cell.warmups,
                "prompts_sha256": _prompts_sha256(log),
                "seed": cell.seed,
                "warmup_seed": warmup_seed,
                "warmup_client_s": round(warmup_client_s, 3),
                "session": {
                    "id": session.id,
                    "restart": cell.restart,
                    "reused": session.reused,
                    "age_s": round(session_age_s, 3),
                    "times_s": session.times_s,
                    "folder": _relative(session.folder, files.folder),
                },
                "client": {
                    "argv": ["vllm", *argv],
                    "seconds": round(ended.seconds, 3),
                    "cpu_s": round(ended.cpu_s, 3),
                },
                "smoke": smoke,
                "completed": sum(not error for error in bench["errors"]),
                "bench_sha256": sha256_file(files.bench),
                "node": node_now(os.environ),
                "environment_digest": environment_digest(read_json(environment)),
                "code_version": __version__,
            },
        )


def _prompts(cell: Cell, dataset: Path | None, made: Path) -> Path | None:
    """The file that the client reads its prompts from, if any; of a text's lines it is put together at `made`."""
    if dataset is None or cell.load["dataset"] != "sonnet":
        return dataset
    write_prompts_of_lines(
        dataset,
        made,
        seed=cell.seed,
        count=cell.prompts,
        input_tokens=int(cell.load["input_tokens"]),
        output_tokens=int(cell.load["output_tokens"]),
    )
    return made


def _prompts_sha256(log: Path) -> str | None:
    """Hash of the prompts that the client sent; None where this version of it can't be watched."""
    path = prompts_file(log)
    if not path.exists():
        return None
    found = str(read_json(path)["sha256"])
    path.unlink()
    return found


def _relative(path: Path, folder: Path) -> str:
    """A path as seen from the cell's folder, so that a moved results tree keeps its links."""
    return os.path.relpath(path, folder)


@dataclass(frozen=True)
class _Client:
    """The session's warm client, told what a cell wants."""

    session: Session
    cell: Cell
    tokenizer: str
    log: Path
    lost: Callable[[], str | None]
    view: CellView | None

    def run(
        self,
        prompts: int,
        seed: int,
        result: Path | None,
        *,
        started: Callable[[int], None] | None = None,
        dataset: Path | None = None,
    ) -> tuple[list[str], ClientExit]:
        """One run of the client; `started` is told its process id.

        Returns:
            what it was told, and how it ended.
        """
        argv = bench_command(
            self.cell,
            base_url=self.session.front_url,
            tokenizer=self.tokenizer,
            prompts=prompts,
            seed=seed,
            result=result,
            dataset=dataset,
        )
        if self.session.client_socket is None:
            raise UserError("the session has no client", mend="report this as a bug")
        try:
            if self.view is not None:
                self.view.phase("warm-up" if result is None else "", prompts, self.log)
            ended = run_warm(self.session.client_socket, argv, self.log, self._watch, started=started)
        except UserError as error:
            # The client goes with its session; why that ended says more.
            raise self._stopped(self.lost() or str(error)) from None
        if ended.stopped is not None:
            raise self._stopped(ended.stopped)
        if ended.exit_code != 0:
            how = f"signal {ended.signal}" if ended.signal else f"exit code {ended.exit_code}"
            raise UserError(
                f"the client ended with {how}; its last lines: {_tail(self.log)}", where=str(self.log)
            )
        return argv, ended

    def _watch(self) -> str | None:
        if self.view is not None:
            self.view.look()
        return self.lost()

    def _stopped(self, why: str) -> UserError:
        return UserError(
            f"the cell was stopped: {why}", where=self.cell.cell_id, mend="see the engines' logs"
        )


def _tail(log: Path, lines: int = 4) -> str:
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "(no log)"
    return " | ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip())


def _read_bench(raw: Path, log: Path) -> dict[str, Any]:
    try:
        bench = orjson.loads(raw.read_bytes().replace(b"Infinity", b"null").replace(b"NaN", b"null"))
    except (OSError, orjson.JSONDecodeError) as error:
        raise UserError(
            f"the client left no readable result ({error}); its last lines: {_tail(log)}", where=str(log)
        ) from None
    if not isinstance(bench, dict) or "errors" not in bench:
        raise UserError("the client's result has no per-request detail", where=str(log))
    return bench


def _engine_facts(session: Session) -> dict[str, Any]:
    path = session.folder / facts.FILE
    try:
        return read_json(path)
    except OSError as error:
        raise UserError(
            f"what the engines said of themselves is gone ({error.strerror})",
            where=str(path),
            mend="leave the logs of a session alone while it is up, and run again",
        ) from None
