# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from results import detailed, save
from splitbench.tables import dataset
from splitbench.tables.docs import render
from splitbench.tables.schema import TABLES

PAGE = Path(__file__).parents[3] / "docs" / "tables.md"


def test_the_page_is_the_one_the_schema_makes():
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "run: python -m splitbench.tables.docs docs/tables.md"
    )


def test_every_column_is_on_the_page_with_its_unit_in_the_name():
    page = render()
    for table in TABLES.values():
        for column in table.columns:
            assert f"| `{column.name}` |" in page
            if "latency" in column.meaning and column.type == "double":
                assert column.name.endswith(("_ms", "_s"))


def test_what_the_page_shows_works(tmp_path, ingest, monkeypatch):
    ingest(save(tmp_path / "r.json", detailed()), layout="agg")
    page = render()
    statement = re.search(r'splitbench sql "([^"]+)"', page)[1]
    [row] = dataset.sql([tmp_path / "cell"], statement).to_pylist()
    assert row["layout"] == "agg" and row["p99_ms"] > 0
    (tmp_path / "results").mkdir()
    (tmp_path / "cell").rename(tmp_path / "results" / "cell")
    monkeypatch.chdir(tmp_path)
    one_liner = re.search(r"requests = (pd\.concat.*)", page)[1]
    requests = eval(one_liner, {"pd": pd, "Path": Path})
    assert len(requests) == 8 and requests["ttft_ms"].notna().all()
