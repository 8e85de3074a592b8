# SPDX-License-Identifier: Apache-2.0
"""What is kept with a cell besides the client's result: logs, telemetry, and what its session was asked beforehand."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from splitbench.errors import UserError
from splitbench.experiment.cells import Cell
from splitbench.experiment.models import Telemetry, Thresholds
from splitbench.files import read_json, write_json
from splitbench.measuring.evidence import Series
from splitbench.measuring.gpus import Gpus
from splitbench.measuring.logs import read_part, size_of
from splitbench.measuring.scrape import sampled, source_of
from splitbench.measuring.smoke import smoke
from splitbench.measuring.telemetry import Sampler, members, to_json
from splitbench.serving.processes import all_processes
from splitbench.serving.session import Session

GAUGES_EVERY_S = 5.0
"""On GPUs. The whole page once a second was seen to merge tokens into chunks of two: an engine renders it in the loop
that sends tokens, and that takes longer than a token."""


@dataclass(frozen=True)
class Watching:
    """How a cell is watched; nothing in here changes what is measured."""

    telemetry: Telemetry = field(default_factory=Telemetry)
    thresholds: Thresholds = field(default_factory=Thresholds)
    longest: int = 512
    """Tokens of prompt and answer that the layout's engines are known to take."""


class SessionNotes:
    """What is known of a session from before its first cell, kept in its folder for the cells that come later."""

    def __init__(self, session: Session) -> None:
        self._path = session.folder / "measuring.json"
        if self._path.exists():
            self._notes: dict[str, Any] = read_json(self._path)
        else:
            ready = {engine.name: size_of(engine.log) for engine in session.engines}
            self._notes = {"ready_bytes": ready, "smoke": None, "smoke_s": None}
            write_json(self._path, self._notes)

    @property
    def ready_bytes(self) -> Mapping[str, int]:
        """Length of every engine's log when the session was ready."""
        return dict(self._notes["ready_bytes"])

    def smoke(
        self, cell: Cell, session: Session, watching: Watching, progress: Callable[[str], None]
    ) -> dict[str, Any]:
        """The session's smoke test, run once.

        Raises:
            UserError: it failed; such a session is not measured.
        """
        if self._notes["smoke"] is None:
            began = time.monotonic()
            found = smoke(cell, session, watching.longest, watching.thresholds)
            self._notes["smoke"] = {name: check.as_dict() for name, check in found.items()}
            self._notes["smoke_s"] = round(time.monotonic() - began, 3)
            write_json(self._path, self._notes)
            for check in found.values():
                progress(f"smoke test of {cell.layout}: {check.name} {check.verdict}: {check.reason}")
        checks: dict[str, Any] = self._notes["smoke"]
        failed = [check for check in checks.values() if check["verdict"] == "invalid"]
        if failed:
            reasons = "; ".join(f"{check['name']}: {check['reason']}" for check in failed)
            raise UserError(
                f"the layout failed its smoke test and is not measured: {reasons}",
                where=f"layouts.{cell.layout}",
                mend=f"read the engines' logs in {session.folder}, mend the connector, run again",
            )
        return checks


class Around:
    """Telemetry and logs of one cell: `begin` before the client starts, `end` after it."""

    def __init__(self, cell: Cell, session: Session, watching: Watching, owner: int | None) -> None:
        self._session = session
        on_gpus = cell.plan.budget.kind == "gpus"
        # What other nodes do is not seen from here, apart from what their engines say.
        devices = [device for engine in cell.plan.engines if not engine.node for device in engine.devices]
        self._gpus = Gpus.of(sorted(set(devices))) if on_gpus else None
        settings = watching.telemetry
        every_s = settings.metrics_interval_s
        if every_s is None:
            every_s = GAUGES_EVERY_S if on_gpus else 0.0
        roots = {source_of(engine): engine.pid for engine in session.engines}
        if session.proxy is not None:
            roots["proxy"] = session.proxy.pid
        self._sampler = Sampler(
            roots,
            ours=[owner or os.getpid()],
            interval_s=settings.interval_s,
            scrape=(lambda: sampled(session)) if every_s else None,
            scrape_interval_s=every_s or settings.interval_s,
            gpus=self._gpus,
        )
        self._ours = [int(one["process"].partition(":")[0]) for one in session.record["processes"]]
        self._marks: dict[str, int] = {}
        self._foreign: list[str] = []

    def begin(self) -> None:
        """Mark the logs and start sampling."""
        self._marks = {engine.name: size_of(engine.log) for engine in self._session.engines}
        self._foreign = self._strangers()
        self._sampler.start()

    def client_started(self, pid: int) -> None:
        """The client's process."""
        self._sampler.watch_client(pid)

    def _strangers(self) -> list[str]:
        if self._gpus is None:
            return []
        # Services too: the server of MPS computes on the GPU for both engines, and its control program starts it.
        table = all_processes()
        family = {member for pid in self._ours for member in members(pid, table)}
        return self._gpus.foreign(family, groups=self._ours)

    def end(self, notes: SessionNotes, ticks: Path) -> tuple[dict[str, Any], bytes]:
        """Stop sampling.

        Args:
            notes: of the session.
            ticks: where the client left how late its event loop was.

        Returns:
            telemetry as plain data, and the logs of all engines, compressed.
        """
        series = self._sampler.stop()
        loop = read_ticks(ticks)
        telemetry = {
            "series": to_json(series),
            "foreign": sorted({*self._foreign, *self._strangers()}),
            "ticks": loop,
            "processors": os.cpu_count(),
            "sampler_cpu_s": round(self._sampler.cpu_s, 4),
        }
        logs = {}
        for engine in self._session.engines:
            ready, mark, now = notes.ready_bytes[engine.name], self._marks[engine.name], size_of(engine.log)
            logs[engine.name] = {
                "role": engine.role,
                "ready_bytes": ready,
                "cell_bytes": [mark, now],
                "start": read_part(engine.log, 0, ready),
                "cell": read_part(engine.log, mark, now),
            }
        return telemetry, gzip.compress(orjson.dumps(logs), compresslevel=6, mtime=0)


def read_ticks(path: Path) -> list[list[float]]:
    """Moments (client's clock, s) and lateness (s) of the client's event loop; empty where it left none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    except (OSError, json.JSONDecodeError):
        return []
    return [[float(moment), float(late)] for moment, late in found]


def loop_lateness(ticks: Sequence[Sequence[float]], begin_s: float, end_s: float) -> dict[str, float] | None:
    """How late the client's event loop was between two moments; None where nothing is known."""
    late = sorted(late * 1e3 for moment, late in ticks if begin_s <= moment <= end_s)
    if not late:
        return None
    return {
        "ticks": float(len(late)),
        "p50_ms": late[(len(late) - 1) // 2],
        "p99_ms": late[min(len(late) - 1, -(-99 * len(late) // 100) - 1)],
        "max_ms": late[-1],
    }


def lateness_series(ticks: Sequence[Sequence[float]], zero_s: float) -> list[Series]:
    """The worst lateness of every second, as telemetry."""
    worst: dict[int, float] = {}
    for moment, late in ticks:
        second = int(moment - zero_s)
        worst[second] = max(late * 1e3, worst.get(second, 0.0))
    if not worst:
        return []
    times = [float(second) for second in sorted(worst)]
    return [Series("client", "loop_late_max_ms", times, [round(worst[int(t)], 3) for t in times])]
