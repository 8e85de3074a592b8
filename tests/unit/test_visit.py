# SPDX-License-Identifier: Apache-2.0
"""The visit to a GPU node: phases go on when the caller has left, conditions hold, results come back in pieces."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "h200"


@pytest.fixture(scope="module")
def visit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("visit", FOLDER / "visit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(work: Path, *arguments: str, out: Path | None = None) -> str:
    shown = subprocess.run(
        [
            sys.executable,
            FOLDER / "visit.py",
            "--work",
            work,
            "--workflow-python",
            sys.executable,
            *(("--out", str(out)) if out is not None else ()),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def done(work: Path) -> list[dict[str, Any]]:
    path = work / "visit" / "done.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_phases_follow_each_other_as_their_conditions_say(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    text = call(work, "--wait", "60", "unpack", "+probe@20", "-probe@20", "-probe", out=out)
    assert "no carry has come yet" in text
    found = [(each["phase"], each["ok"], each["why"]) for each in done(work)]
    assert found == [
        ("unpack", False, "no carry has come yet"),
        ("+probe@20", False, "not wanted"),
        ("-probe@20", True, None),
        ("-probe", True, "not wanted"),
    ]
    with tarfile.open(out / "visit.tar.xz") as tar:
        names = tar.getnames()
    assert {"visit/done.jsonl", "visit/probe/uname.txt", "visit/probe/nvidia-smi-q.txt"} <= set(names)
    # The runner works on a copy, so that a later call may bring a changed tree.
    assert (work / "repo" / "Snakefile").exists()
    assert not (work / "repo" / ".git").exists()


def test_a_phase_goes_on_without_a_watcher_and_is_ended_by_its_limit_or_by_a_skip(tmp_path: Path) -> None:
    work = tmp_path / "work"
    call(work, "probe@20")  # brings the tree
    sleeper = work / "repo" / "benchmarks" / "h200" / "nixl_bandwidth.py"
    changed = "import time\ntime.sleep(60)\n"
    sleeper.write_text(changed)
    # The runner is started from the copy, so this call must not bring the real file back: its tree is the copy.
    environment = os.environ | {"PYTHONPATH": str(work / "repo")}
    command = [
        sys.executable,
        sleeper.with_name("visit.py"),
        "--work",
        work,
        "--workflow-python",
        sys.executable,
    ]
    subprocess.run([*command, "bandwidth@2", "bandwidth@50"], check=True, env=environment, timeout=60)
    until = time.monotonic() + 30
    while len(done(work)) < 2 and time.monotonic() < until:
        time.sleep(0.2)
    assert done(work)[1]["why"] == "its time was over"
    time.sleep(1.5)
    subprocess.run([*command, "--wait", "30", "skip"], check=True, env=environment, timeout=60)
    assert done(work)[2]["why"] == "was skipped"
    assert done(work)[2]["seconds"] < 45


def test_results_come_back_in_pieces_below_the_limit(
    visit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"begin" + b"x" * 5_000_000 + b"end")
    other = tmp_path / "b.bin"
    other.write_bytes(os.urandom(100_000))
    data = visit.packed(tmp_path, [log, other, tmp_path / "gone"])
    (tmp_path / "it.tar.xz").write_bytes(data)
    with tarfile.open(tmp_path / "it.tar.xz") as tar:
        member = tar.extractfile("a.log")
        assert member is not None
        text = member.read()
        assert len(text) < 4_200_000 and text.startswith(b"begin") and text.endswith(b"end")
        assert tar.getnames() == ["a.log", "b.bin"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "cells:h200-single:agg:8k-256:1,2@300",
            ("", "cells", ["h200-single", "agg", "8k-256", "1,2"], 300.0),
        ),
        ("-bandwidth", ("-", "bandwidth", [], 90.0)),
        ("+report:h200-single", ("+", "report", ["h200-single"], 120.0)),
    ],
)
def test_phases_are_read(visit: ModuleType, text: str, found: tuple[Any, ...]) -> None:
    assert visit.parse(text) == found
    with pytest.raises(SystemExit):
        visit.parse("nonsense")


def test_cells_and_targets_of_an_experiment() -> None:
    root = FOLDER.parents[1]

    def shown(*arguments: str) -> list[str]:
        command = [sys.executable, FOLDER / "cells.py", "config/experiments/h200-single.yaml", *arguments]
        environment = os.environ | {"PYTHONPATH": str(root)}
        return subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=True
        ).stdout.split()

    assert len(shown("cells", "agg")) == 12
    some = shown("cells", "pd-lmcache:8k-256:16,32")
    assert [path.split("/")[-3] for path in some] == ["c32", "c16"]
    assert all(path.startswith("results/h200-single/cells/pd-lmcache-") for path in some)
    assert len(shown("environment")) == 7
