# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workflow.flow import Flow, stub_python


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stubbed serving environment's interpreter."""
    return stub_python(tmp_path_factory.mktemp("stub") / "venv")


@pytest.fixture
def flow(tmp_path: Path, stub: Path) -> Iterator[Flow]:
    """An empty working folder; afterwards no process of it may be left, and no secret of the shell in any file."""
    made = Flow(tmp_path, stub)
    yield made
    left = made.gone()
    assert not left, f"processes are left: {left}"
    assert not made.telling()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, stub: Path) -> Flow:
    """A working folder in which everything was run; tests may only look, or plan."""
    made = Flow(tmp_path_factory.mktemp("finished"), stub)
    made.config = made.edited("node/selftest_streams", [4])
    done = made.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert not made.telling()
    return made
