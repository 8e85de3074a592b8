# SPDX-License-Identifier: Apache-2.0
"""Lines for a person on standard error: plain ones that stay and, on a terminal only, one that moves.

There are no colours and no control sequences but the carriage return, so a log file or a pipe gets plain lines.
"""

from __future__ import annotations

import os
import sys
import threading

QUIET = "SPLITBENCH_QUIET"
"""Variable; set to anything: no lines of progress, from the command line or from rules."""

_lock = threading.Lock()
_moving = ""


def quiet() -> bool:
    """Whether only errors are wanted."""
    return bool(os.environ.get(QUIET))


def say(line: str) -> None:
    """One line that stays; when it is to be quiet, only errors do."""
    if quiet() and not line.startswith("error: "):
        return
    with _lock:
        _erase()
        sys.stderr.write(f"splitbench: {line}\n")
        sys.stderr.flush()


def moves() -> bool:
    """Whether standard error is a terminal on which a line can be rewritten."""
    return not quiet() and sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")


def move(line: str) -> None:
    """Rewrite the line that moves; empty: take it away. Only where `moves()`."""
    global _moving
    with _lock:
        _erase()
        # One that wraps could not be taken away again.
        _moving = line[: _columns() - 1]
        sys.stderr.write(_moving)
        sys.stderr.flush()


def _erase() -> None:
    global _moving
    if _moving:
        sys.stderr.write("\r" + " " * len(_moving) + "\r")
        _moving = ""


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
