# SPDX-License-Identifier: Apache-2.0
"""What all targets demand of an answer to bad input."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from splitbench.errors import UserError

LONGEST_LINE = 4000


class Hangs(BaseException):
    """An example took longer than a user would wait; no handler of the code under test catches it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise `Hangs` in the block when it computes longer."""

    def stop(number: int, frame: Any) -> None:
        raise Hangs(f"more than {seconds:g} s")

    # Processor time: on a busy machine a wait says nothing.
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def answered(call: Callable[[], Any], *, names: str | None = None, seconds: float = 20) -> UserError | None:
    """Call something with bad input: it may work, or fail as a `UserError` that is fit to be printed.

    Args:
        call: what is tried.
        names: text that every line of the message must hold, such as the file.
        seconds: of processor time, after which it counts as a hang.
    """
    try:
        with within(seconds):
            call()
    except UserError as error:
        lines = str(error).split("\n")
        assert all(line.strip() for line in lines), lines
        assert all(line.isprintable() for line in lines), lines
        assert all(len(line) <= LONGEST_LINE for line in lines), [len(line) for line in lines]
        assert names is None or all(names in line for line in lines), lines
        return error
    return None
