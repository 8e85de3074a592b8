# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, why_not
from tests.workflow.flow import stub_python


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A private SLURM: a head and two nodes."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    made = Cluster()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stubbed serving environment's interpreter, on a disk that all machines see."""
    return stub_python(tmp_path_factory.mktemp("stub") / "venv")
