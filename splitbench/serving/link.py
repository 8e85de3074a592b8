# SPDX-License-Identifier: Apache-2.0
"""JSON lines to and from a supervisor, from the side of those who use a session."""

from __future__ import annotations

import json
import select
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from splitbench.serving.state import supervisor_socket


class Link:
    """JSON lines to and from a supervisor."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        self.closed = False

    @classmethod
    def open(cls, state: Path) -> Link | None:
        """Connect to the supervisor of a state folder; None when none listens."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(5.0)  # a stuck supervisor's queue of callers may be full
        try:
            connection.connect(str(supervisor_socket(state)))
            connection.settimeout(None)
        except OSError:
            connection.close()
            return None
        return cls(connection)

    @classmethod
    def dead(cls) -> Link:
        """A link to a supervisor that ended before we could call."""
        found = cls(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        found.close()
        return found

    def send(self, **content: Any) -> None:
        """Send one message; a supervisor that has gone shows when its answer is read."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(content).encode() + b"\n")

    def _take(self) -> list[dict[str, Any]]:
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def pending(self) -> list[dict[str, Any]]:
        """Messages that are there now."""
        while not self.closed:
            try:
                data = self._connection.recv(65536, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            self.closed = not data
            self._buffer += data
        return self._take()

    def messages(self, limit_s: float | None) -> list[dict[str, Any]]:
        """Messages as soon as there are any; empty when the time is over or the supervisor has gone."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while True:
            found = self.pending()
            if found or self.closed:
                return found
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return []
            self.wait(left)

    def wait(self, limit_s: float | None) -> None:
        """Sleep until something has come, or the limit."""
        if not self.closed:
            poll = select.poll()  # select() knows no descriptor above 1023
            poll.register(self._connection, select.POLLIN)
            poll.poll(None if limit_s is None else max(0.0, limit_s * 1e3))

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        self._connection.close()
