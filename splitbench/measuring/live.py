# SPDX-License-Identifier: Apache-2.0
"""The cell that is being measured, for a person: a line that moves on a terminal, else one a minute; and for `status`.

The figures come from the client itself, which notes them in the file that is read here (`client_server._Live`). Engines
are not asked: where they run on cores, rendering their /metrics page would hold up the tokens that are measured.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from splitbench import console
from splitbench.measuring.client import live_file
from splitbench.measuring.progress import Live, Standing
from splitbench.serving.processes import ProcessId
from splitbench.serving.state import progress_record

MOVE_S = 1.0
LINE_S = 60.0
RECORD_S = 2.0


class CellView:
    """Shows one cell while it runs.

    Args:
        standing: where the run stood when the cell started.
        state: this node's state folder, where `splitbench status` looks.
    """

    def __init__(self, standing: Standing, state: Path) -> None:
        self._standing = standing
        self._record = progress_record(state)
        self._began_s = self._phase_s = time.monotonic()
        self._what = ""
        self._of = 0
        self._log: Path | None = None
        self._shown_s = self._recorded_s = self._began_s

    def __enter__(self) -> CellView:
        """The session is up: what the cell itself takes counts from here."""
        self._began_s = self._shown_s = self._recorded_s = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        """The cell has ended, however it did."""
        console.move("")
        if self._log is not None:
            live_file(self._log).unlink(missing_ok=True)  # a client that was killed leaves it
        self._record.unlink(missing_ok=True)

    def phase(self, what: str, requests: int, log: Path) -> None:
        """The client is started with so many requests; `what` is empty for those that are measured."""
        self._what, self._of, self._log = what, requests, log
        self._phase_s = time.monotonic()

    def look(self) -> None:
        """To be called about twice a second while the client runs."""
        now_s = time.monotonic()
        show = now_s - self._shown_s >= (MOVE_S if console.moves() else LINE_S)
        record = now_s - self._recorded_s >= RECORD_S
        if not show and not record:
            return
        line, short, live = self.line(now_s)
        if show:
            self._shown_s = now_s
            if console.moves():
                console.move(short)
            else:
                console.say(line)
        if record:
            self._recorded_s = now_s
            record_of_cell = {"process": str(ProcessId.current()), "line": line, **live}
            # Renamed, so never half-written; not synced to the disk, which could hold the machine up.
            aside = self._record.with_suffix(".part")
            aside.write_text(json.dumps(record_of_cell), encoding="utf-8")
            aside.replace(self._record)

    def line(self, now_s: float) -> tuple[str, str, dict[str, Any]]:
        """The line at a moment (monotonic, s), the one for terminals, and the same as data."""
        live = read_live(self._log, self._of, self._what)
        spent_s = now_s - self._began_s
        whole_s = None
        if live.done and not self._what:
            whole_s = self._phase_s - self._began_s + (now_s - self._phase_s) * live.of / live.done
        standing = self._standing
        line = standing.line(spent_s, live, whole_s)
        short = standing.short_line(spent_s, live, whole_s)
        return (
            line,
            short,
            {
                "cell": standing.position,
                "cells": standing.total,
                "layout": standing.load.layout,
                "workload": standing.load.workload,
                "concurrency": standing.load.concurrency,
                "phase": self._what or "measuring",
                "requests": live.of,
                "done": live.done,
                "failed": live.failed,
                "ttft_ms": live.ttft_ms,
                "itl_ms": live.itl_ms,
                "left_s": None if (left_s := standing.left_s(spent_s, whole_s)) is None else round(left_s),
            },
        )


def read_live(log: Path | None, of: int, phase: str = "") -> Live:
    """What the client with this log says of itself; nothing in its first second, or of a strange version."""
    try:
        found = json.loads(live_file(log).read_text(encoding="utf-8")) if log is not None else {}
    except (OSError, ValueError):
        found = {}
    return Live(
        done=int(found.get("done", 0)),
        of=of,
        phase=phase,
        failed=int(found.get("failed", 0)),
        ttft_ms=found.get("ttft_ms"),
        itl_ms=found.get("itl_ms"),
    )
