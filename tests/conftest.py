# SPDX-License-Identifier: Apache-2.0
"""What all tests share: a private state folder, checked to be left without a process."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splitbench.serving.ending import stop
from splitbench.serving.processes import marked

# A shell starts its background jobs with SIGINT ignored, and so does what those start: tests that interrupt would wait
# for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Their tests share a run of the whole workflow.
_OF_A_FINISHED_RUN = ("test_archive.py", "test_environment.py", "test_rerun.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first."""
    order = {"real": 0, "finished": 1}
    items.sort(key=lambda item: order.get(_group(item.nodeid), 2 if "/workflow/" in item.nodeid else 3))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Over several processes (`-n`): what belongs together stays in one, in the order of the collection."""
    from xdist.scheduler import LoadScopeScheduling

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False
    return InGroups(config, log)


def _group(nodeid: str) -> str:
    """What a test shares: real engines, a finished run, its file's fixtures; others of the workflow nothing."""
    file = Path(nodeid.partition("::")[0])
    if file.parent.name == "real":
        return "real"
    if file.parent.name != "workflow":
        return str(file)
    return "finished" if file.name in _OF_A_FINISHED_RUN else nodeid


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
