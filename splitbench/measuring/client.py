# SPDX-License-Identifier: Apache-2.0
"""The workflow's side of the warm client: ask for a run, watch over it, know how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from splitbench.errors import UserError

WATCH_S = 0.5
STOP_S = 5.0


class ClientExit(BaseModel):
    """How a run of the benchmark client ended."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pid: int
    exit_code: int | None
    """None where a signal ended it."""
    signal: int | None
    seconds: float
    cpu_s: float
    """Processor seconds of the client, user and system."""
    stopped: str | None = None
    """Why we ended it; None where it ended by itself."""


def client_env(model: str) -> dict[str, str]:
    """Environment of a warm client: it reports to nobody, and looks nothing up where the model is a folder."""
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1" if Path(model).exists() else "0",
    }


def run_warm(
    socket_path: Path,
    argv: Sequence[str],
    log: Path,
    watch: Callable[[], str | None],
    *,
    cwd: Path | None = None,
    started: Callable[[int], None] | None = None,
) -> ClientExit:
    """Run `vllm ARGV` in the warm client behind `socket_path` and wait for its end.

    Args:
        argv: the arguments after `vllm`, from "bench", "serve" on.
        log: file that gets its output, appended.
        watch: asked about twice a second; a text means: end the run, and this is why.
        cwd: where it runs; None for here.
        started: told the process id of the run.

    Raises:
        UserError: no warm client there, or it went away before the run ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    request = {"argv": list(argv), "log": str(log.absolute()), "cwd": str((cwd or Path.cwd()).absolute())}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(socket_path))
            connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise _gone(socket_path, error.strerror or str(error)) from error
        # Leaving this block, for whatever reason, closes the connection; that ends a run that goes on.
        lines = _Lines(connection, socket_path)
        stopped: str | None = None
        kill_at_s: float | None = None
        pid = 0
        while True:
            message = lines.next(WATCH_S)
            if message is not None:
                if "error" in message:
                    raise UserError(
                        str(message["error"]), where=str(socket_path), mend="see the client's log"
                    )
                if "pid" not in message:
                    return ClientExit.model_validate({**message, "pid": pid, "stopped": stopped})
                pid = int(message["pid"])
                if started is not None:
                    started(pid)
                continue
            if stopped is None:
                stopped = watch()
                if stopped is not None:
                    if not pid:
                        return ClientExit(
                            pid=0, exit_code=None, signal=None, seconds=0.0, cpu_s=0.0, stopped=stopped
                        )
                    _signal(pid, signal.SIGTERM)
                    kill_at_s = time.monotonic() + STOP_S
            elif kill_at_s is not None and time.monotonic() >= kill_at_s:
                _signal(pid, signal.SIGKILL)
                kill_at_s = None


def ticks_file(log: Path) -> Path:
    """Where a run with this log leaves how late its event loop was: JSON, [[moment s, lateness s], ...]."""
    return log.with_name(f"{log.name}.ticks")


def prompts_file(log: Path) -> Path:
    """Where a run with this log leaves the hash of its prompts: JSON, {"sha256": ..., "prompts": ...}."""
    return log.with_name(f"{log.name}.prompts")


def live_file(log: Path) -> Path:
    """Where a run with this log says how far it is, while it runs: JSON, see `client_server._Live`."""
    return log.with_name(f"{log.name}.live")


class _Lines:
    """JSON lines from the server, one at a time."""

    def __init__(self, connection: socket.socket, path: Path) -> None:
        self.connection = connection
        self.path = path
        self.received = bytearray()

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, or None after `timeout_s` without one."""
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self.received:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self.connection], [], [], left_s)[0]:
                return None
            try:
                data = self.connection.recv(65536)
            except ConnectionError as error:
                raise _gone(self.path, error.strerror or str(error)) from error
            if not data:
                raise _gone(self.path, "it closed the connection")
            self.received += data
        line, _, rest = bytes(self.received).partition(b"\n")
        self.received = bytearray(rest)
        message = json.loads(line)
        assert isinstance(message, dict)
        return message


def _signal(pid: int, number: int) -> None:
    # The server reaps the process when it reports its end to us: until then the number is its own.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _gone(path: Path, why: str) -> UserError:
    return UserError(f"the warm benchmark client is not there: {why}", where=str(path), mend="see its log")
