# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from splitbench.tables.ingest import ingest_cell


@pytest.fixture(autouse=True)
def no_disk_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut during these tests does not matter; waiting for the disk a thousand times does."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


# A busy machine is no failure.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


class Ingested:
    """A cell's three parts, read back."""

    def __init__(self, raw: Path, folder: Path, **options: Any) -> None:
        record = options.pop("record", None)
        self.paths = ingest_cell(raw, {"cell_id": "a/b/c4/1-1", **options}, folder, record=record)
        self.cell: dict[str, Any] = pq.read_table(self.paths.cell).to_pylist()[0]
        self.requests: pa.Table = pq.read_table(self.paths.requests)
        self.tokens: pa.Table = pq.read_table(self.paths.tokens)

    def column(self, name: str) -> list[Any]:
        return self.requests[name].to_pylist()


@pytest.fixture
def ingest(tmp_path: Path) -> Callable[..., Ingested]:
    """Ingest a file into a folder of its own and read the parts back."""

    def run(raw: Path, **options: Any) -> Ingested:
        return Ingested(raw, tmp_path / "cell", **options)

    return run
