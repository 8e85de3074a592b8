# SPDX-License-Identifier: Apache-2.0
"""The archives that the repository shows as evidence hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitbench.archive.verify import verify

REFERENCE = Path(__file__).parents[3] / "reference"


@pytest.mark.parametrize("archive", sorted(REFERENCE.rglob("*.zip")), ids=lambda path: path.stem)
def test_a_reference_archive_holds(archive: Path) -> None:
    assert verify(archive).differs == []
