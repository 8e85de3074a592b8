# SPDX-License-Identifier: Apache-2.0
"""The state folder, owners, the node's lock, and the memory for plans that failed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from splitbench.errors import UserError
from splitbench.serving.processes import ProcessId
from splitbench.serving.state import Owner, lock_holder, node_lock, poison, poisoned, state_folder


def test_the_folder_is_private_and_the_same_for_all_processes(tmp_path: Path) -> None:
    wanted = tmp_path / "s"
    folder = state_folder({"SPLITBENCH_STATE": str(wanted), "TMPDIR": "/elsewhere"})
    assert folder == wanted.resolve()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert state_folder({"SPLITBENCH_STATE": str(wanted)}) == folder


def test_a_link_and_its_target_are_one_folder(tmp_path: Path) -> None:
    folder = state_folder({"SPLITBENCH_STATE": str(tmp_path / "s")})
    (tmp_path / "link").symlink_to(folder)
    assert state_folder({"SPLITBENCH_STATE": str(tmp_path / "link")}) == folder


def test_a_folder_that_others_could_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o755)
    with pytest.raises(UserError, match="is open to other users; chmod 700"):
        state_folder({"SPLITBENCH_STATE": str(folder)})
    folder.chmod(0o700)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(UserError, match="belongs to another user"):
        state_folder({"SPLITBENCH_STATE": str(folder)})


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="longer than 80 bytes"):
        state_folder({"SPLITBENCH_STATE": str(tmp_path / ("x" * 80))})


def test_an_owner_is_handed_on_by_the_environment() -> None:
    me = Owner.current()
    assert Owner.from_env({"SPLITBENCH_OWNER": str(me)}) == me
    assert me.alive()
    assert not Owner(me.pid, me.started + 1).alive()
    assert Owner.from_env({}) is None
    with pytest.raises(UserError, match="SPLITBENCH_OWNER: '4711' is not"):
        Owner.from_env({"SPLITBENCH_OWNER": "4711"})


def _hold(state: Path, entered: Any, leave: Any) -> None:
    with node_lock(state, "cell agg/long/c8/0-0", lambda text: None):
        entered.set()
        leave.wait()


def test_the_second_waits_and_says_for_whom(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, entered, leave))
    holder.start()
    entered.wait()
    said: list[str] = []

    def announce(text: str) -> None:
        said.append(text)
        leave.set()

    with node_lock(tmp_path, "another", announce, poll_s=0.01):
        assert lock_holder(tmp_path).startswith(f"another (pid {os.getpid()}, ")
    holder.join()
    assert len(said) == 1
    assert said[0].startswith(f"waiting for cell agg/long/c8/0-0 (pid {holder.pid}, for ")
    assert not (tmp_path / "node.json").exists()


def test_the_lock_goes_with_a_holder_that_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, entered, leave))
    holder.start()
    entered.wait()
    timer = threading.Timer(0.1, holder.kill)
    timer.start()
    with node_lock(tmp_path, "another", lambda text: None, poll_s=0.01):
        assert not holder.is_alive()
    holder.join()


def test_a_failed_plan_is_remembered_for_its_owner_only(tmp_path: Path) -> None:
    me = Owner.current()
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    process = ProcessId.of(child.pid)
    assert process is not None
    other = Owner(process.pid, process.started)
    poison(tmp_path, other, "key", {"message": "theirs"})
    poison(tmp_path, me, "key", {"message": "mine"})
    assert poisoned(tmp_path, me, "key") == {"message": "mine"}
    assert poisoned(tmp_path, other, "key") == {"message": "theirs"}
    assert poisoned(tmp_path, me, "another key") is None
    assert poisoned(tmp_path, None, "key") is None
    child.kill()
    child.wait()
    poison(tmp_path, me, "another key", {"message": "mine too"})
    assert poisoned(tmp_path, other, "key") is None, "what the dead remembered is dropped"
    assert poisoned(tmp_path, me, "key") == {"message": "mine"}
