# SPDX-License-Identifier: Apache-2.0
"""temporary"""

from __future__ import annotations

import json
import socket
import os, signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ClientExit:
    exit_code: int | None
    seconds: float
    cpu_s: float
    stopped: str | None = None

    def describe(self) -> str:
        return f"exit code {self.exit_code}"


def run_warm(path: Path, argv: list[str], log: Path, watch: Callable[[], str | None]) -> ClientExit:
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(path))
        s.sendall(json.dumps({"argv": argv, "log": str(log.absolute()), "cwd": os.getcwd()}).encode() + b"\n")
        s.settimeout(0.5)
        data = b""
        pid = None
        while True:
            try:
                got = s.recv(65536)
                if not got:
                    return ClientExit(None, 0, 0, "client gone")
                data += got
            except TimeoutError:
                reason = watch()
                if reason:
                    return ClientExit(None, 0, 0, reason)
            *lines, data = data.split(b"\n")
            for line in lines:
                answer = json.loads(line)
                if "exit_code" in answer:
                    return ClientExit(answer["exit_code"], answer["seconds"], answer["cpu_s"])
