# SPDX-License-Identifier: Apache-2.0
"""The chain behind a result, and two archives side by side."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from splitbench.archive.compare import Reading, _judged, compare, difference, mover, words
from splitbench.archive.trace import config_lines
from splitbench.cli import main
from tests.fakes.finished_results import finish, small_config
from tests.unit.archive.conftest import Finished


def _trace(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["trace", "--json", *arguments]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_figure_leads_to_its_cells_and_lines(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "results/tiny/figures/ttft_of_layouts-long.png"
    found = _trace(capsys, name, "--in", str(finished.archive))
    ids = [cell for cell in finished.flow.cells.ids if "/c2/" in cell]
    assert [cell["id"] for cell in found["cells"]] == ids  # type: ignore[attr-defined]
    first = found["cells"][0]  # type: ignore[index]
    names = ("cell", "bench", "metrics", "engine_facts", "telemetry", "logs.json.gz", "record")
    folder = f"results/tiny/cells/{ids[0]}"
    assert first["raw"] == [f"{folder}/{n}.gz" if "." in n else f"{folder}/{n}.json.gz" for n in names]
    assert first["plan"] == "results/tiny/plans/agg.json"
    assert first["environment"] == finished.index["environment"]["probe"]
    assert first["digest"] == finished.flow.cells[ids[0]].digest
    lines = (finished.folder / "experiment.yaml").read_text().splitlines()
    keys = {item["key"]: item for item in found["config"]}  # type: ignore[attr-defined]
    assert lines[keys["layouts.pd"]["first"] - 1].strip() == "pd:"
    assert "figures.ttft_of_layouts" in keys and "slo" not in keys


@pytest.mark.parametrize("where", ["folder", "archive"])
def test_parts_raw_files_plans_and_the_report_are_traced(
    finished: Finished, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    cell = finished.flow.cells.ids[0]
    cells = finished.flow.cells.ids
    cases = {
        f"parts/{cell}/requests.parquet": [cell],
        f"cells/{cell}/bench.json": [cell],
        f"logs/cells/{cell}.log": [cell],
        "plans/agg.json": [c for c in cells if c.startswith("agg")],
        "tables/cells.parquet": cells,
        "statistics.json": cells,
        "report.html": cells,
        finished.index["environment"]["probe"].removeprefix("results/tiny/"): cells,
    }
    for name, wanted in cases.items():
        if where == "folder":
            found = _trace(capsys, str(finished.folder / "results/tiny" / name))
        else:
            found = _trace(capsys, f"results/tiny/{name}", "--in", str(finished.archive))
        assert sorted(c["id"] for c in found["cells"]) == sorted(wanted), name  # type: ignore[attr-defined]


def test_in_words(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(finished.folder / "results/tiny/figures/ttft_of_layouts-long.csv")]) == 0
    out = capsys.readouterr().out
    assert "rests on 2 cell(s)" in out and "experiment.yaml:" in out and "bench.json" in out
    assert main(["trace", "results/tiny/nothing", "--in", str(finished.archive)]) == 1
    assert "no file" in capsys.readouterr().err


def test_lines_of_a_key() -> None:
    text = "a: 1\nb:\n  c: {x: 1}\n  d:\n    - 1\n    # note\n\ne: 2\n"
    assert config_lines(text, ["b"]) == (2, 5)
    assert config_lines(text, ["b", "c"]) == (3, 3)
    assert config_lines(text, ["b", "d"]) == (4, 5)
    assert config_lines(text, ["e"]) == (8, 8)
    assert config_lines(text, ["b", "z"]) is None
    nested = "l:\n  a:\n    x:\n    - 1\n  b: |\n    text\n  c: 2\n"
    assert [config_lines(nested, ["l", key]) for key in "abc"] == [(2, 4), (5, 6), (7, 7)]


def test_an_archive_against_itself_shows_nothing(finished: Finished) -> None:
    found = compare(finished.archive, finished.archive)
    assert not found.environment and not found.slices and not found.only and not found.claims
    assert len(found.cells) == 4 * 4
    assert all(cell.change == 0 and cell.differs is not True for cell in found.cells)


def test_another_machine_and_a_slower_run_are_seen(
    finished: Finished, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from splitbench.archive.build import build_archive

    config = small_config()
    flow = finish(
        tmp_path,
        config,
        root=repository,
        slower=3.0,
        machine={"cpu": {"model": "other", "cores_usable": [0]}},
    )
    other = tmp_path / "other.zip"
    build_archive(flow, config, "", other, folder=tmp_path, known={})
    found = compare(finished.archive, other)
    assert ("machine.cpu.model", "made", "other") in found.environment
    assert not found.slices
    median = next(c for c in found.cells if (c.metric, c.percentile, c.concurrency) == ("itl_ms", 50.0, 2))
    assert median.a.value is not None and median.b.value == pytest.approx(3 * median.a.value)
    assert any("within the SLO" in claim["claim"] for claim in found.claims) or "Claims: " in words(found)
    assert main(["compare", str(finished.archive), str(other)]) == 0
    assert "machine.cpu.model: made -> other" in capsys.readouterr().out


def test_claims_and_verdicts_that_came_out_differently() -> None:
    def side(claim: str, verdict: str) -> SimpleNamespace:
        named = {"layout": "pd", "reference": "agg", "workload": "long"}
        statistics = {
            "claims": [{"claim": "flat", "outcome": claim}],
            "verdicts": [named | {"outcome": verdict}],
        }
        return SimpleNamespace(statistics=statistics)

    assert not list(_judged(side("yes", "pays"), side("yes", "pays")))  # type: ignore[arg-type]
    assert list(_judged(side("yes", "pays"), side("no", "open"))) == [  # type: ignore[arg-type]
        {"claim": "claim 'flat'", "a": "yes", "b": "no"},
        {"claim": "verdict on pd against agg, long", "a": "pays", "b": "open"},
    ]


def test_the_interval_of_a_difference() -> None:
    interval = mover((10.0, 9.0, 12.0), (20.0, 17.0, 21.0))
    assert interval.low == pytest.approx(10 - (9 + 4) ** 0.5)
    assert interval.high == pytest.approx(10 + (1 + 1) ** 0.5)
    load = ("agg", "long", 1)
    sure = difference(load, "itl_ms", 50.0, Reading(10, 9, 12, 400, True), Reading(20, 17, 21, 400, True))
    assert sure.differs is True
    small = difference(load, "itl_ms", 50.0, Reading(10, 9, 12, 4, False), Reading(20, 17, 21, 400, True))
    assert small.differs is None and small.low is not None
    none = difference(load, "itl_ms", 99.0, Reading(10, 9, None, 4, False), Reading(20, 17, 21, 400, True))
    assert none.low is None and none.change == 10
