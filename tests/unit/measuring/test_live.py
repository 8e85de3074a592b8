# SPDX-License-Identifier: Apache-2.0
"""What a person sees of the cell that runs: on a terminal, in a log file, by `status`."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from splitbench import console
from splitbench.measuring import live
from splitbench.measuring.client import live_file
from splitbench.measuring.live import CellView, read_live
from splitbench.measuring.progress import Load, Standing
from splitbench.serving.commands import status_text
from splitbench.serving.state import node_lock, progress_record
from splitbench.workflow import REPOSITORY

STANDING = Standing(2, 4, Load("pd", "long", 8, 88), "", 60.0, [], {Load("agg", "long", 8, 88): 30.0})
NOTED = {"done": 20, "failed": 0, "in_flight": 8, "ttft_ms": 1903.2, "itl_ms": 26.4}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(live, "time", made)
    return made


def noted(tmp_path: Path) -> Path:
    log = tmp_path / "cell.client.log"
    # As the client pads it.
    live_file(log).write_text(json.dumps(NOTED).ljust(200), encoding="utf-8")
    return log


def test_without_a_terminal_there_is_a_plain_line_a_minute(
    state: Path, tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with CellView(STANDING, state) as view:
        view.phase("", 80, noted(tmp_path))
        for _ in range(250):
            clock.now_s += 0.5
            view.look()
    lines = capsys.readouterr().err.splitlines()
    # 20 of 80 requests in 60 s, so 180 s for the rest; then, standing still, in 120 s.
    assert lines == [
        "splitbench: cell 2/4: pd long c=8 | 20/80 requests, TTFT 1903 ms, ITL 26 ms | 2:00 gone, about 3:00 left",
        "splitbench: cell 2/4: pd long c=8 | 20/80 requests, TTFT 1903 ms, ITL 26 ms | 3:00 gone, about 6:00 left",
    ]


def test_quiet_shows_nothing_and_status_still_knows(
    state: Path,
    tmp_path: Path,
    clock: Clock,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(console.QUIET, "1")
    monkeypatch.setenv("SPLITBENCH_STATE", str(state))
    with node_lock(state, "a cell", lambda text: None), CellView(STANDING, state) as view:
        view.phase("warm-up", 8, noted(tmp_path))
        clock.now_s += 70
        view.look()
        found = json.loads(status_text(as_json=True))["progress"]
        assert (found["cell"], found["cells"], found["done"], found["requests"]) == (2, 4, 20, 8)
        assert (found["phase"], found["itl_ms"], found["layout"]) == ("warm-up", 26.4, "pd")
        assert "  cell 2/4: pd long c=8 | warm-up: 20/8 requests, TTFT 1903 ms" in status_text()
        # Of a process that was killed: its number may be another's by now, its start can't.
        record = progress_record(state)
        record.write_text(json.dumps(found | {"process": f"{os.getpid()}:1"}), encoding="utf-8")
        assert json.loads(status_text(as_json=True))["progress"] is None
    assert capsys.readouterr().err == ""
    assert not progress_record(state).exists()
    assert not live_file(tmp_path / "cell.client.log").exists()


def test_what_the_client_has_not_said_is_not_shown(tmp_path: Path) -> None:
    log = tmp_path / "cell.client.log"
    assert read_live(None, 8).text() == read_live(log, 8).text() == "0/8 requests"
    live_file(log).write_text('{"done": 3, "fai', encoding="utf-8")
    assert read_live(log, 8).text() == "0/8 requests"


ON_TERMINAL = """
from splitbench import console
console.say("one that stays")
console.move("a long line that moves " + "x" * 200)
console.move("short")
console.say("another that stays")
console.move("gone at the end")
console.move("")
"""


@pytest.mark.parametrize(("term", "moves"), [("xterm", True), ("dumb", False)])
def test_on_a_terminal_one_line_moves_and_no_control_sequence_is_sent(term: str, moves: bool) -> None:
    ours, theirs = pty.openpty()
    code = ON_TERMINAL if moves else "from splitbench import console\nassert not console.moves()"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "TERM": term}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=environment, check=True)
    seen = b""
    while select.select([ours], [], [], 0.2)[0]:
        seen += os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    assert b"\x1b" not in seen
    if moves:
        assert screen(seen.decode()) == ["splitbench: one that stays", "splitbench: another that stays", ""]


def screen(text: str) -> list[str]:
    """What stays to be read of a terminal's output: a carriage return goes back, and what follows overwrites."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown: list[str] = []
        for part in line.split("\r"):
            assert len(part) < 80  # one that wraps could not be taken away
            shown[: len(part)] = part
        lines.append("".join(shown).rstrip())
    return lines
