# SPDX-License-Identifier: Apache-2.0
"""The warm client against a command line that is not vLLM's but behaves as told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from splitbench.errors import UserError
from splitbench.measuring import client_server
from splitbench.measuring.around import read_ticks
from splitbench.measuring.client import live_file, prompts_file, run_warm, ticks_file

SERVER = Path(client_server.__file__)
MAIN = """
import os, subprocess, sys, time

LOADED = os.getpid()
seen = []


def main():
    word = sys.argv[1]
    seen.append(word)
    forked = LOADED != os.getpid()
    print("argv", sys.argv[1:], "cwd", os.getcwd(), "runs", len(seen), "forked", forked, flush=True)
    if word == "exit":
        sys.exit(int(sys.argv[2]))
    if word == "exit-text":
        sys.exit("no such model")
    if word == "raise":
        raise ValueError("wrong figure")
    if word == "sleep":
        time.sleep(float(sys.argv[2]))
    if word == "stubborn":
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(float(sys.argv[2]))
    if word == "leave-child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("child", child.pid, flush=True)
        if len(sys.argv) > 2:
            time.sleep(float(sys.argv[2]))
    if word == "burn":
        until = time.process_time() + float(sys.argv[2])
        while time.process_time() < until:
            pass
    if word == "prompts":
        import asyncio
        import vllm.benchmarks.serve as serve

        async def work():
            requests = serve.get_samples(int(sys.argv[2]))
            await asyncio.sleep(0.4)
            return len(requests)

        print("sent", asyncio.run(work()), flush=True)
    if word == "requests":
        import asyncio
        from vllm.benchmarks.lib import endpoint_request_func as functions

        print("live", asyncio.run(functions.two(sys.argv[2])), flush=True)
    if word == "buffered":
        sys.stdout.write("last words")
"""
SERVE = """
from types import SimpleNamespace


def get_samples(seed):
    return [SimpleNamespace(prompt=f"{seed} {n}", expected_output_len=8) for n in range(3)]
"""

# Two requests as vLLM's client keeps them: one is done, one is half-way when the file is looked at.
REQUESTS = """
import asyncio
import os
from dataclasses import dataclass, field


@dataclass
class RequestFuncOutput:
    success: bool = False
    error: str = ""
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)


async def two(path):
    early, late, lost = RequestFuncOutput(), RequestFuncOutput(), RequestFuncOutput(error="refused")
    early.ttft, early.itl, early.success = 0.5, [9.0] * 90 + [0.020] * 10, True
    late.ttft, late.itl = 0.7, [0.022]
    while not os.path.exists(path):
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    seen = open(path).read()
    late.itl += [0.030] * 20
    late.success = True
    await asyncio.sleep(1.2)
    return seen.strip() + "|" + open(path).read().strip()
"""


def _wait(condition: Callable[[], object], what: str) -> None:
    until_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until_s, f"waited in vain for: {what}"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _nothing() -> str | None:
    return None


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    package = tmp_path / "packages" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").write_text("")
    (package / "main.py").write_text(MAIN)
    benchmarks = tmp_path / "packages" / "vllm" / "benchmarks"
    benchmarks.mkdir()
    (benchmarks / "__init__.py").write_text("")
    (benchmarks / "serve.py").write_text(SERVE)
    (benchmarks / "lib").mkdir()
    (benchmarks / "lib" / "__init__.py").write_text("")
    (benchmarks / "lib" / "endpoint_request_func.py").write_text(REQUESTS)
    return tmp_path / "packages"


@pytest.fixture
def server(fake_vllm: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    path = tmp_path / "client.sock"
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(SERVER), str(path)],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(fake_vllm)},
        )
    try:
        _wait(path.exists, "the socket")
        yield process, path
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_runs_the_command_line_and_reports_its_end(
    server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    _, path = server
    for expected in (0, 3):
        ended = run_warm(path, ["exit", str(expected)], tmp_path / "run.log", _nothing, cwd=tmp_path)
        assert (ended.exit_code, ended.signal, ended.stopped) == (expected, None, None)
        assert 0 < ended.seconds < 60
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert lines == [
        f"argv ['exit', '{code}'] cwd {tmp_path} runs 1 forked True" for code in (0, 3)
    ]  # "runs 1" both times: what the first run changed did not reach the second


def test_ends_as_python_itself_would(server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path) -> None:
    _, path = server
    log = tmp_path / "run.log"
    assert run_warm(path, ["raise"], log, _nothing).exit_code == 1
    assert "ValueError: wrong figure" in log.read_text()
    assert run_warm(path, ["exit-text"], log, _nothing).exit_code == 1
    assert "no such model" in log.read_text()
    assert run_warm(path, ["buffered"], log, _nothing).exit_code == 0
    assert log.read_text().endswith("last words")


def test_counts_the_processor_seconds_of_the_run(
    server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    _, path = server
    busy = run_warm(path, ["burn", "0.5"], tmp_path / "run.log", _nothing)
    assert 0.5 <= busy.cpu_s < 5
    assert run_warm(path, ["exit", "0"], tmp_path / "run.log", _nothing).cpu_s < busy.cpu_s


def test_a_reason_to_stop_ends_the_run(server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path) -> None:
    _, path = server
    log = tmp_path / "run.log"
    ended = run_warm(path, ["sleep", "600"], log, lambda: "the engine died" if log.exists() else None)
    assert (ended.exit_code, ended.signal, ended.stopped) == (None, signal.SIGTERM, "the engine died")
    assert not _alive(ended.pid)


def test_a_run_that_ignores_the_request_is_killed(
    server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitbench.measuring.client.STOP_S", 0.2)
    log = tmp_path / "run.log"
    ended = run_warm(
        server[1],
        ["stubborn", "600"],
        log,
        lambda: "stop" if log.exists() and "deaf" in log.read_text() else None,
    )
    assert ended.signal == signal.SIGKILL
    assert not _alive(ended.pid)


def test_a_closed_connection_ends_its_run_and_no_other(
    server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    _, path = server
    pids = []
    connections = []
    for name in ("a", "b"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        log = tmp_path / f"{name}.log"
        connection.sendall(
            json.dumps({"argv": ["leave-child", "600"], "log": str(log), "cwd": "/"}).encode() + b"\n"
        )
        pids.append(json.loads(connection.recv(4096))["pid"])
        connections.append(connection)
        _wait(lambda log=log: log.exists() and "child" in log.read_text(), "the run's own child")
    child = int((tmp_path / "a.log").read_text().split("child ")[1])
    connections[0].close()
    _wait(lambda: not _alive(pids[0]) and not _alive(child), "the end of the first run and its child")
    assert _alive(pids[1])
    connections[1].close()


def test_what_a_run_leaves_behind_ends_with_it(
    server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    assert run_warm(server[1], ["leave-child"], log, _nothing).exit_code == 0
    child = int(log.read_text().split("child ")[1])
    _wait(lambda: not _alive(child), "the end of the child")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_run_outlives_the_server(
    server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path, how: signal.Signals
) -> None:
    process, path = server
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        request = {"argv": ["sleep", "600"], "log": str(tmp_path / "run.log"), "cwd": "/"}
        connection.sendall(json.dumps(request).encode() + b"\n")
        pid = json.loads(connection.recv(4096))["pid"]
        assert _alive(pid)
        process.send_signal(how)
        process.wait(timeout=30)
        _wait(lambda: not _alive(pid), "the end of the run")
    assert path.exists() == (how == signal.SIGKILL)


def test_the_server_ends_with_the_process_that_started_it(fake_vllm: Path, tmp_path: Path) -> None:
    path = tmp_path / "client.sock"
    starter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            "server = subprocess.Popen([sys.executable, *sys.argv[1:]])\n"
            "print(server.pid, flush=True)\n"
            "time.sleep(600)",
            str(SERVER),
            str(path),
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(fake_vllm)},
        text=True,
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    assert "ready" in starter.stdout.readline()
    starter.kill()
    starter.wait()
    _wait(lambda: not _alive(pid), "the end of the server")
    assert not path.exists()


def test_the_server_outlives_the_thread_that_started_it(fake_vllm: Path, tmp_path: Path) -> None:
    path = tmp_path / "client.sock"
    starter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, threading, time\n"
            "start = lambda: subprocess.Popen([sys.executable, *sys.argv[1:]])\n"
            "thread = threading.Thread(target=start)\n"
            "thread.start(); thread.join()\n"
            "time.sleep(600)",
            str(SERVER),
            str(path),
        ],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(fake_vllm)},
    )
    try:
        _wait(path.exists, "the socket")
        assert run_warm(path, ["exit", "0"], tmp_path / "run.log", _nothing).exit_code == 0
    finally:
        starter.kill()
        starter.wait()
        _wait(lambda: not path.exists(), "the end of the server")


def test_the_socket_is_the_users_alone_and_a_dead_servers_is_replaced(
    server: tuple[subprocess.Popen[bytes], Path], fake_vllm: Path, tmp_path: Path
) -> None:
    process, path = server
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    process.kill()
    process.wait()
    with pytest.raises(UserError, match="warm benchmark client is not there"):
        run_warm(path, ["exit", "0"], tmp_path / "run.log", _nothing)
    second = subprocess.Popen(
        [sys.executable, str(SERVER), str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(fake_vllm)},
        text=True,
    )
    try:
        assert second.stdout is not None
        assert "1 Python thread(s)" in second.stdout.readline()
        assert run_warm(path, ["exit", "4"], tmp_path / "run.log", _nothing).exit_code == 4
    finally:
        second.terminate()
        second.wait(timeout=30)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"not json\n", "not a request"),
        (b'{"argv": ["a"]}\n', "argv, log and cwd"),
        (b'{"argv": "a", "log": "/x", "cwd": "/"}\n', "list of texts"),
        (b'{"argv": [], "log": "x", "cwd": "/"}\n', "absolute path"),
        (b'{"argv": [], "log": "/no/such/folder/log", "cwd": "/"}\n', "cannot start"),
    ],
)
def test_a_wrong_request_is_answered_and_harms_nothing(
    server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path, line: bytes, why: str
) -> None:
    _, path = server
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(line)
        assert why in json.loads(connection.recv(4096))["error"]
        assert connection.recv(4096) == b""
    assert run_warm(path, ["exit", "0"], tmp_path / "run.log", _nothing).exit_code == 0


def test_the_server_going_away_in_the_middle_is_an_error(
    server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    process, path = server
    log = tmp_path / "run.log"

    def kill_server() -> str | None:
        if log.exists():
            process.kill()
        return None

    with pytest.raises(UserError, match="warm benchmark client is not there"):
        run_warm(path, ["sleep", "600"], log, kill_server)


def test_a_run_leaves_how_late_its_loop_was_and_which_prompts_it_sent(
    server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    _, path = server
    log = tmp_path / "run.log"
    pids: list[int] = []
    hashes = []
    for seed in ("1", "1", "2"):
        begin_s = time.perf_counter()
        ended = run_warm(path, ["prompts", seed], log, _nothing, started=pids.append)
        assert ended.exit_code == 0
        ticks = read_ticks(ticks_file(log))
        assert 4 <= len(ticks) <= 8
        assert all(begin_s < moment < time.perf_counter() and late >= 0 for moment, late in ticks)
        hashes.append(json.loads(prompts_file(log).read_text()))
    assert "sent 3" in log.read_text()
    assert len(set(pids)) == 3
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[0]["prompts"] == 3


def test_a_run_says_how_far_it_is_while_it_runs(
    server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    _, path = server
    log = tmp_path / "run.log"
    assert run_warm(path, ["requests", str(live_file(log))], log, _nothing).exit_code == 0
    shown = log.read_text().partition("live ")[2].splitlines()[0].split("|")
    first, second = (json.loads(text) for text in shown)
    # Medians of the last gaps of each request; what ended before the look before counts no more.
    assert first == {"done": 2, "failed": 1, "in_flight": 1, "ttft_ms": 700.0, "itl_ms": 20.0}
    assert second == {"done": 3, "failed": 1, "in_flight": 0, "ttft_ms": 700.0, "itl_ms": 30.0}
    assert not live_file(log).exists()
