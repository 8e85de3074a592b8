# SPDX-License-Identifier: Apache-2.0
"""Identities of processes, and the rule that nothing but our own is ever signalled."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitbench.serving import processes
from splitbench.serving.launch import child_environment
from splitbench.serving.processes import (
    ProcessId,
    descendants,
    end_processes,
    environment,
    marked,
    read_stat,
    related,
)

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
NAMES = {"SPLITBENCH_SESSION": "s1", "SPLITBENCH_SESSION_STATE": "/nowhere/state"}


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Collects children, and ends those that a test left."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for child in started:
        child.kill()
        child.wait()


def sleeper(
    children: list[subprocess.Popen[bytes]], env: dict[str, str] | None = None, session: bool = True
) -> ProcessId:
    """A child that sleeps, in an OS session of its own or not."""
    children.append(subprocess.Popen(SLEEP, env=env, start_new_session=session))
    found = ProcessId.of(children[-1].pid)
    assert found is not None
    return found


def test_a_stat_line_is_read_whatever_the_command_is_called(
    children: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    odd = tmp_path / "a) Z 1 (b"
    odd.symlink_to(sys.executable)
    children.append(subprocess.Popen([str(odd), "-S", "-c", "import time; time.sleep(600)"]))
    stat = read_stat(children[0].pid)
    assert stat is not None
    assert stat.parent == os.getpid()
    assert not stat.dead


def test_identity_survives_only_as_long_as_its_process(children: list[subprocess.Popen[bytes]]) -> None:
    process = sleeper(children)
    assert process.alive()
    assert ProcessId.parse(str(process)) == process
    children[0].kill()
    while process.alive():
        time.sleep(0.001)
    stat = read_stat(process.pid)
    assert stat is not None, "a zombie is still in the table, and counts as dead"
    assert stat.dead


def test_a_reused_pid_is_not_signalled(children: list[subprocess.Popen[bytes]]) -> None:
    process = sleeper(children)
    earlier = ProcessId(process.pid, process.started - 100)
    assert not earlier.alive()
    assert earlier.signal(signal.SIGKILL) is False
    assert process.alive()
    assert process.signal(signal.SIGKILL) is True
    assert children[0].wait() == -signal.SIGKILL


def test_signals_work_without_pidfd(
    children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    process = sleeper(children)
    assert ProcessId(process.pid, process.started - 100).signal(signal.SIGTERM) is False
    assert process.signal(signal.SIGTERM) is True
    assert children[0].wait() == -signal.SIGTERM


def test_only_processes_with_the_mark_of_this_state_folder_are_found(
    children: list[subprocess.Popen[bytes]],
) -> None:
    ours = sleeper(children, {**os.environ, **NAMES})
    sleeper(children, {**os.environ, **NAMES, "SPLITBENCH_SESSION_STATE": "/another/state"})
    sleeper(children)
    assert marked("/nowhere/state") == [ours]
    assert marked("/nowhere/state", "s1") == [ours]
    assert marked("/nowhere/state", "s2") == []


def test_another_users_processes_are_never_ours(
    children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = sleeper(children, {**os.environ, **NAMES})
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert marked("/nowhere/state") == []
    assert related([process]) == []


def test_an_orphan_that_overwrote_its_environment_is_found_by_its_session(tmp_path: Path) -> None:
    # As vLLM's EngineCore: forked by a server that was killed, its environment gone with its new title.
    note = tmp_path / "pid"
    code = (
        "import os, sys, time\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.execve(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(600)'], {})\n"
        f"open({str(note)!r}, 'w').write(str(child))\n"
        "time.sleep(600)\n"
    )
    server = subprocess.Popen(
        [sys.executable, "-S", "-c", code], start_new_session=True, env={**os.environ, **NAMES}
    )
    identity = ProcessId.of(server.pid)
    assert identity is not None
    while not (note.exists() and note.read_text()):
        time.sleep(0.005)
    orphan = int(note.read_text())
    while environment(orphan) != {}:
        time.sleep(0.005)
    server.kill()
    server.wait()
    try:
        assert [process.pid for process in marked("/nowhere/state")] == []
        assert [process.pid for process in related([identity])] == [orphan]
        assert related([ProcessId(identity.pid, identity.started + 10**9)]) == []
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_session_number_that_was_given_again_is_left_alone(children: list[subprocess.Popen[bytes]]) -> None:
    stranger = sleeper(children)  # leads a session with the recorded number, but was started at another time
    assert related([ProcessId(stranger.pid, stranger.started - 500)]) == []


def test_a_member_of_the_session_without_the_mark_is_left_alone(
    children: list[subprocess.Popen[bytes]],
) -> None:
    code = f"import subprocess, time; subprocess.Popen({SLEEP!r}, env={{'A': '1'}}); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    children.append(child)
    leader = ProcessId.of(child.pid)
    assert leader is not None
    while not (below := descendants(child.pid, processes.all_processes())):
        time.sleep(0.005)
    other = below[0].pid
    while environment(other) != {"A": "1"}:
        time.sleep(0.005)
    child.kill()
    child.wait()
    try:
        assert related([leader]) == []
    finally:
        os.kill(other, signal.SIGKILL)


def test_end_asks_first_and_kills_what_stays(children: list[subprocess.Popen[bytes]]) -> None:
    deaf = [
        sys.executable,
        "-S",
        "-c",
        "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)",
    ]
    polite = sleeper(children)
    children.append(subprocess.Popen(deaf, start_new_session=True))
    stubborn = ProcessId.of(children[1].pid)
    assert stubborn is not None

    def ignores_sigterm() -> bool:
        text = Path(f"/proc/{stubborn.pid}/status").read_text()
        return bool(int(text.partition("SigIgn:\t")[2].split()[0], 16) & 1 << 14)

    while not ignores_sigterm():
        time.sleep(0.005)

    def remaining() -> list[ProcessId]:
        return [process for process in (polite, stubborn) if process.alive()]

    ending = asyncio.run(end_processes([polite, stubborn], remaining, 0.3))
    assert ending.killed == 1
    assert ending.left == ()
    assert ending.took_s >= 0.3
    assert children[0].wait() == -signal.SIGTERM
    assert children[1].wait() == -signal.SIGKILL


def test_a_childs_environment_is_the_plans() -> None:
    inherited = {
        "PATH": "/usr/bin",
        "HOME": "/home/me",
        "OMP_NUM_THREADS": "1",
        "UCX_TLS": "tcp",
        "VLLM_CACHE_ROOT": "/cache",
        "VLLM_USE_V1": "0",
        "PYTHONPATH": "/mine",
        "HF_HOME": "/models",
    }
    made = child_environment(inherited, {"UCX_TLS": "cuda_ipc"}, ["/envs/serving/bin/python"], NAMES)
    assert made == {
        "PATH": "/envs/serving/bin:/usr/bin",
        "HOME": "/home/me",
        "VLLM_CACHE_ROOT": "/cache",
        "HF_HOME": "/models",
        "UCX_TLS": "cuda_ipc",
        "PYTHONUNBUFFERED": "1",
        "SPT_NOENV": "1",
        **NAMES,
    }
    assert child_environment(inherited, {"PATH": "/only"}, ["/x/python"], NAMES)["PATH"] == "/only"
    assert child_environment(inherited, {}, ["python"], NAMES)["PATH"] == "/usr/bin"
