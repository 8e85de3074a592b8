# SPDX-License-Identifier: Apache-2.0
"""From a number on the page to its cells, its plan, the config's lines, the environment and the raw files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitbench.archive.place import in_archive
from splitbench.archive.trace_number import trace_number
from splitbench.cli import main
from splitbench.report.numbers import number_id, numbers_of
from tests.unit.archive.conftest import Finished


def _number(finished: Finished, of: list[Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["trace", "--json", number_id(of), "--in", str(finished.archive)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_cell_s_percentile_leads_to_its_raw_file(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = finished.flow.cells.ids[-1]
    found = _number(finished, ["cell", cell, "itl_ms", "p99"], capsys)
    (only,) = found["cells"]
    assert only["id"] == cell and f"results/tiny/cells/{cell}/bench.json.gz" in only["raw"]
    assert f"results/tiny/parts/{cell}/tokens.parquet" in only["parts"]
    assert only["plan"] and only["environment"] == finished.index["environment"]["probe"]
    assert found["facts"]["says"].startswith("≥") and "needs" in found["facts"]["says"]
    keys = {item["key"] for item in found["config"]}
    assert {"layouts.pd", "workloads.long", "stack", "matrix"} <= keys and "layouts.agg" not in keys


def test_other_numbers_lead_to_the_cells_that_they_rest_on(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = finished.flow.cells.ids
    cases: list[tuple[list[Any], list[str], str | None]] = [
        (["slo", "pd", "long"], [cell for cell in ids if cell.startswith("pd-")], "statistics.json"),
        (["counts"], ids, "tables/cells.parquet"),
        (["plan", "agg"], [cell for cell in ids if cell.startswith("agg-")], None),
        (["config", "slo"], [], None),
        (["machine", "processor"], ids, None),
        (["check", ids[0], "tokens"], ids[:1], "tables/checks.parquet"),
    ]
    for of, cells, made_from in cases:
        found = _number(finished, of, capsys)
        assert sorted(cell["id"] for cell in found["cells"]) == sorted(cells), of
        assert found["facts"].get("made_from") == (made_from and f"results/tiny/{made_from}"), of
    lines = (finished.folder / "experiment.yaml").read_text(encoding="utf-8").splitlines()
    (slo,) = _number(finished, ["config", "slo"], capsys)["config"]
    assert slo["key"] == "slo" and lines[slo["first"] - 1].startswith("slo:")


def test_every_id_of_the_page_can_be_traced(finished: Finished) -> None:
    with in_archive(finished.archive) as place:
        page = (place.read("results/tiny/report.html") or b"").decode("utf-8")
        names = numbers_of(page)
        ids = set(finished.flow.cells.ids)
        assert len(names) > 50
        for name, stated in list(names.items())[:: max(1, len(names) // 15)]:
            found = trace_number(place, name)
            assert found.facts["number"] == name and {cell.id for cell in found.cells} <= ids
            assert found.cells or stated.of[0] in ("config", "command")


def test_a_folder_of_results_and_words(
    finished: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = finished.flow.cells.ids[0]
    name = number_id(["cell", cell, "ttft_ms", "p50"])
    monkeypatch.chdir(finished.folder)
    for arguments in (["--configfile", "experiment.yaml"], ["--in", "results/tiny"]):
        assert main(["trace", name, *arguments]) == 0
        out = capsys.readouterr().out
        assert f"cell, {cell}, ttft_ms, p50" in out and "experiment.yaml:" in out and "bench.json" in out
        assert "rests on 1 cell(s)" in out


def test_an_id_that_is_not_there(
    finished: Finished, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["trace", "n-0123456789", "--in", str(finished.archive)]) == 1
    assert "no number 'n-0123456789'" in capsys.readouterr().err
    assert main(["trace", "n-0123456789", "--in", str(tmp_path)]) == 1
    assert "holds no report" in capsys.readouterr().err
