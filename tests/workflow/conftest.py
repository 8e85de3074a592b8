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


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, stub: Path) -> Flow:
    """A working folder in which everything was run; tests may only look, or plan.

    Its title and an engine's environment hold shell text, which would make a file `injected` if a shell read it.
    """
    made = Flow(tmp_path_factory.mktemp("finished"), stub)
    text = "$(touch injected) `touch injected` '; touch injected; '"
    made.config = made.edited("title", text)
    made.config["node"]["selftest_streams"] = [4]
    made.config["engine"]["env"]["NOTE"] = text
    done = made.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert made.gone(5) == []
    assert not made.telling()
    return made
