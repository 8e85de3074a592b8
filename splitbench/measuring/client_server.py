# SPDX-License-Identifier: Apache-2.0
"""Keeps the benchmark client warm: import vLLM once, then fork one `vllm bench serve` per request.

Run by the serving environment's Python; the standard library is all it needs besides vLLM. What a request
runs is the `main()` of vLLM's own command line with the request's arguments, in a process of its own:
nothing that one run loads or changes reaches the next. Only the imports, about 12 s a run, are saved.

    python client_server.py SOCKET

One request per connection, as lines of JSON:

    -> {"argv": ["bench", "serve", ...], "log": PATH, "cwd": PATH}
    <- {"pid": 4711}                                                    at once
    <- {"exit_code": 0, "signal": null, "seconds": 9.1, "cpu_s": 3.2}   when it has ended

A request that makes no sense is answered with {"error": TEXT}. A connection that closes early ends its run.
The server ends on SIGTERM, and when the process that started it is gone; either way it takes its runs with
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMAND_LINE = "vllm.entrypoints.cli.main"
# What `vllm bench serve` loads. Any of it may be absent or elsewhere in another version.
WARM = (
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.benchmark.latency",
    "vllm.entrypoints.cli.benchmark.mm_processor",
    "vllm.entrypoints.cli.benchmark.serve",
    "vllm.entrypoints.cli.benchmark.startup",
    "vllm.entrypoints.cli.benchmark.sweep",
    "vllm.entrypoints.cli.benchmark.throughput",
    "vllm.entrypoints.cli.collect_env",
    "vllm.entrypoints.cli.download_kernels",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.preload",
    "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.snapshot",
    "vllm.benchmarks.serve",
    "vllm.tokenizers",
    "vllm.tokenizers.hf",
    "vllm.platforms",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
)
STOP_S = 5.0
TICK_S = 0.05
LIVE_S = 1.0
LIVE_GAPS = 8
LIVE_BYTES = 200
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LINE_LIMIT = 1 << 20


@dataclass
class _Run:
    """One connection: first the request comes in, then its process runs."""

    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)
    pid: int = 0
    pidfd: int = -1
    started_s: float = 0.0
    kill_at_s: float | None = None


class ClientServer:
    """Serves a listening socket until told to stop."""

    def __init__(self, listener: socket.socket, main: Callable[[], object], program: str) -> None:
        self.listener = listener
        self.main = main
        self.program = program
        self.selector = selectors.DefaultSelector()
        self.runs: list[_Run] = []
        self.stopping = False

    def stop(self) -> None:
        self.stopping = True

    def serve(self) -> None:
        """Until `stop`: accept, fork, wait. One thread only, or forking would not be safe."""
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(wake_read, selectors.EVENT_READ, lambda: wake_read.recv(64))
        while not self.stopping:
            self._step()
        self.selector.unregister(self.listener)
        for run in list(self.runs):
            self._end(run)
        while self.runs:
            self._step()
        signal.set_wakeup_fd(-1)

    def _step(self) -> None:
        deadlines = [run.kill_at_s for run in self.runs if run.kill_at_s is not None]
        timeout_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, _ in self.selector.select(timeout_s):
            key.data()
        now_s = time.monotonic()
        for run in self.runs:
            if run.kill_at_s is not None and run.kill_at_s <= now_s:
                _signal_group(run.pid, signal.SIGKILL)
                run.kill_at_s = now_s + STOP_S

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection, _ = self.listener.accept()
            connection.setblocking(False)
            run = _Run(connection)
            self.runs.append(run)
            self.selector.register(connection, selectors.EVENT_READ, lambda: self._readable(run))

    def _readable(self, run: _Run) -> None:
        if run not in self.runs:
            return  # it ended in the same round of events
        try:
            data = run.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(run)
            return
        if run.pid:
            return  # nothing more is expected; the end of the connection is what we wait for
        run.received += data
        if b"\n" not in run.received and len(run.received) <= _LINE_LIMIT:
            return
        line, _, _ = bytes(run.received).partition(b"\n")
        try:
            request = _checked(json.loads(line))
        except ValueError as error:
            self._reply(run, {"error": f"not a request: {error}"})
            self._forget(run)
            return
        try:
            self._start(run, request)
        except OSError as error:
            self._reply(run, {"error": f"cannot start: {error}"})
            self._forget(run)

    def _start(self, run: _Run, request: dict[str, Any]) -> None:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        run.started_s = time.monotonic()
        server = os.getpid()
        run.pid = os.fork()
        if run.pid == 0:
            self._become_client(request, log, server)
        os.close(log)
        with contextlib.suppress(OSError):
            os.setpgid(
                run.pid, run.pid
            )  # here and in the child: whoever comes first, the group exists from now on
        run.pidfd = os.pidfd_open(run.pid)
        self.selector.register(run.pidfd, selectors.EVENT_READ, lambda: self._ended(run))
        self._reply(run, {"pid": run.pid})

    def _become_client(self, request: dict[str, Any], log: int, server: int) -> None:
        """The forked child: never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            _die_with_parent(signal.SIGKILL)
            if os.getppid() != server:
                os._exit(128 + signal.SIGKILL)
            self.selector.close()
            self.listener.close()
            for run in self.runs:
                run.connection.close()
                if run.pidfd >= 0:
                    os.close(run.pidfd)
            os.dup2(log, 1)
            os.dup2(log, 2)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.chdir(request["cwd"])
            sys.argv = [self.program, *request["argv"]]
            gc.unfreeze()
            _watch_event_loops(request["log"] + ".ticks", _live_view(request["log"] + ".live"))
            _note_prompts(request["log"] + ".prompts")
            self.main()
            code = 0
        except SystemExit as error:
            code = _exit_code(error)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(BaseException):
                    stream.flush()
            os._exit(code)

    def _ended(self, run: _Run) -> None:
        _, status, usage = os.wait4(run.pid, 0)
        seconds = time.monotonic() - run.started_s
        code = os.waitstatus_to_exitcode(status)
        _signal_group(run.pid, signal.SIGKILL)  # what the run started itself and left behind
        self._reply(
            run,
            {
                "exit_code": code if code >= 0 else None,
                "signal": -code if code < 0 else None,
                "seconds": round(seconds, 3),
                "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
            },
        )
        self._forget(run)

    def _end(self, run: _Run) -> None:
        """Its connection is closed, or we stop: end the process politely; `_step` sees to it that it ends."""
        if not run.pid:
            self._forget(run)
            return
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(run.connection)
        if run.kill_at_s is None:
            _signal_group(run.pid, signal.SIGTERM)
            run.kill_at_s = time.monotonic() + STOP_S

    def _reply(self, run: _Run, message: dict[str, Any]) -> None:
        # A few hundred bytes on a local socket: they fit its buffer, or the other side is gone.
        with contextlib.suppress(OSError):
            run.connection.send(json.dumps(message).encode() + b"\n")

    def _forget(self, run: _Run) -> None:
        self.runs.remove(run)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(run.connection)
        run.connection.close()
        if run.pidfd >= 0:
            self.selector.unregister(run.pidfd)
            os.close(run.pidfd)


def _watch_event_loops(path: str, live: _Live | None) -> None:
    """From now on `asyncio.run` also notes how late its loop wakes up, and writes that to `path` when it ends.

    A token is seen no earlier than the loop comes round, so this lateness is what the client adds to a gap.
    """
    import asyncio

    plain_run = asyncio.run

    async def tick(late: list[tuple[float, float]]) -> None:
        show_s = time.perf_counter() + LIVE_S
        while True:
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            now_s = time.perf_counter()
            late.append((round(now_s, 6), round(now_s - due_s, 6)))
            if live is not None and now_s >= show_s:
                show_s = now_s + LIVE_S
                live.show()

    async def with_ticks(work: Any) -> Any:
        late: list[tuple[float, float]] = []
        ticking = asyncio.ensure_future(tick(late))
        try:
            return await work
        finally:
            ticking.cancel()
            if live is not None:
                live.close()
            with contextlib.suppress(OSError):
                Path(path).write_text(json.dumps(late), encoding="utf-8")

    def run(work: Any, **options: Any) -> Any:
        return plain_run(with_ticks(work), **options)

    asyncio.run = run  # type: ignore[assignment]


class _Live:
    """Where a run is, for whoever waits for it: rewritten once a second, and gone when the run ends.

    It is looked at in the loop that sees the tokens, so the work is bounded: a few of the latest gaps of the requests
    in flight, and one write into a file that is open.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = -1
        self.done = 0
        self.failed = 0
        self.in_flight: list[Any] = []
        self.latest: dict[str, float] = {}

    def look(self) -> dict[str, float]:
        """Requests done, failed and in flight, and medians (ms) over those that were in flight since the last look."""
        gaps: list[float] = []
        for output in self.in_flight:
            gaps += output.itl[-LIVE_GAPS:]
        firsts = [output.ttft for output in self.in_flight if output.ttft > 0]
        for name, values in (("ttft_ms", firsts), ("itl_ms", gaps)):
            if values:
                self.latest[name] = round(sorted(values)[len(values) // 2] * 1e3, 3)
        self.failed += sum(bool(output.error) for output in self.in_flight)
        going = [output for output in self.in_flight if not (output.success or output.error)]
        self.done += len(self.in_flight) - len(going)
        self.in_flight = going
        return {"done": self.done, "failed": self.failed, "in_flight": len(going), **self.latest}

    def show(self) -> None:
        with contextlib.suppress(OSError):
            if self.file < 0:
                self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            os.pwrite(self.file, json.dumps(self.look()).ljust(LIVE_BYTES).encode(), 0)

    def close(self) -> None:
        if self.file >= 0:
            with contextlib.suppress(OSError):
                os.close(self.file)
                Path(self.path).unlink()


def _live_view(path: str) -> _Live | None:
    """From now on the client's requests are known to what is returned; None where this version has others."""
    try:
        functions: Any = importlib.import_module("vllm.benchmarks.lib.endpoint_request_func")
        plain = functions.RequestFuncOutput
        if not {"ttft", "itl", "success", "error"} <= set(vars(plain())):
            return None
    except (ImportError, AttributeError, TypeError):
        return None
    live = _Live(path)

    def noted(*arguments: Any, **options: Any) -> Any:
        output = plain(*arguments, **options)
        live.in_flight.append(output)
        return output

    functions.RequestFuncOutput = noted
    return live


def _note_prompts(path: str) -> None:
    """From now on the client's prompts leave their hash in `path`: which ones, how long answers are, in which order."""
    try:
        serve: Any = importlib.import_module("vllm.benchmarks.serve")
        plain = serve.get_samples
    except (ImportError, AttributeError):
        return  # another version; the record then has no hash

    def get_samples(*arguments: Any, **options: Any) -> Any:
        requests = plain(*arguments, **options)
        digest = hashlib.sha256()
        for request in requests:
            asked = [request.prompt, request.expected_output_len]
            digest.update(json.dumps(asked, default=str).encode())
        with contextlib.suppress(OSError):
            text = json.dumps({"sha256": digest.hexdigest(), "prompts": len(requests)})
            Path(path).write_text(text, encoding="utf-8")
        return requests

    serve.get_samples = get_samples


def _checked(request: Any) -> dict[str, Any]:
    if not isinstance(request, dict) or set(request) != {"argv", "log", "cwd"}:
        raise ValueError("it must hold argv, log and cwd")
    argv = request["argv"]
    if not isinstance(argv, list) or not all(isinstance(argument, str) for argument in argv):
        raise ValueError("argv must be a list of texts")
    for name in ("log", "cwd"):
        if not isinstance(request[name], str) or not request[name].startswith("/"):
            raise ValueError(f"{name} must be an absolute path")
    return request


def _exit_code(error: SystemExit) -> int:
    """As Python itself: None is 0, a number is itself, anything else is printed and gives 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201
    return 1


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _die_with_parent(number: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def _listen(path: Path) -> socket.socket:
    """A listening socket at `path` that only this user can reach; a dead server's socket is replaced."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(16)
    return listener


def _settled_threads() -> int:
    """Wait until the Python threads that imports started are gone, so that forking is safe; how many are left.

    Idle threads of OpenBLAS don't count: it ends them itself before a fork (pthread_atfork).
    """
    until_s = time.monotonic() + STOP_S
    while threading.active_count() > 1 and time.monotonic() < until_s:
        time.sleep(0.02)
    return threading.active_count()


def main() -> int:
    path = Path(sys.argv[1]).absolute()
    parent = os.getppid()
    started_s = time.monotonic()
    servers: list[ClientServer] = []

    def on_signal(number: int, _frame: object) -> None:
        # SIGUSR1 comes when the thread that started us ends; only the end of the whole process counts.
        if number == signal.SIGUSR1 and os.getppid() == parent:
            return
        if servers:
            servers[0].stop()
        else:  # still importing: no run to end
            path.unlink(missing_ok=True)
            os._exit(128 + signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, on_signal)
    _die_with_parent(signal.SIGUSR1)
    # Listening before the import: whoever comes early waits in the queue instead of failing.
    listener = _listen(path)
    try:
        module = importlib.import_module(COMMAND_LINE)
        for name in WARM:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        threads = _settled_threads()
        seconds = time.monotonic() - started_s
        print(f"ready after {seconds:.1f} s with {threads} Python thread(s)", flush=True)  # noqa: T201
        gc.collect()
        gc.freeze()  # keeps the collector from touching, and so copying, the pages that all runs share
        servers.append(ClientServer(listener, module.main, str(module.__file__)))
        servers[0].serve()
    finally:
        listener.close()
        path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
