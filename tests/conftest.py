# SPDX-License-Identifier: Apache-2.0
"""What all tests share: a private state folder, checked to be left without a process."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitbench.serving.ending import stop
from splitbench.serving.processes import marked

# A shell starts its background jobs with SIGINT ignored, and so does what those start: tests that interrupt would wait
# for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def state() -> Iterator[Path]:
    """A state folder of its own (short: Unix sockets live in it); a test must leave nothing that runs."""
    folder = Path(tempfile.mkdtemp(prefix="sb-")).resolve()
    try:
        yield folder
    finally:
        stop(folder)
        left = marked(str(folder))
        shutil.rmtree(folder)
        assert left == []
