# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from splitbench.cli import main
from splitbench.measuring.estimate import Support, estimate, wanted_percentiles
from splitbench.measuring.stage import last_word
from splitbench.workflow import Workflow
from tests.fakes.experiments import GOOD


def flow(**changes: Any) -> Workflow:
    return Workflow(copy.deepcopy(GOOD) | changes)


def measure(one: Workflow, cell_id: str, seconds: float) -> None:
    """A cell's record and slice, as the measuring stage leaves them."""
    cell = one.cells[cell_id]
    folder = Path(one.path(f"cells/{cell_id}"))
    folder.mkdir(parents=True)
    (folder / "cell.json").write_text(json.dumps(cell.slice))
    record = {"prompts": cell.prompts, "warmups": cell.warmups, "total_s": seconds}
    (folder / "record.json").write_text(json.dumps(record))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_nothing_measured_and_no_rate_gives_no_time() -> None:
    found = estimate(flow())
    assert (found.cells, found.todo, found.starts, found.seconds) == (8, 8, 4, None)
    assert found.source == "nothing"
    assert any("not known" in line for line in found.lines())


def test_stated_rates_give_time_and_accelerator_hours() -> None:
    rates = {"startup_s": 100, "prefill_tokens_per_s": 1000, "itl_ms": 50}
    found = estimate(flow(rates=rates, layouts={"tp": GOOD["layouts"]["tp"]}))
    # c=1: 11 requests (one to warm up): 1.1 s of prefill, 11 waves of 8 x 50 ms; c=2: 22: 2.2 s, 11 waves.
    seconds = 100 + (1.1 + 4.4) + (2.2 + 4.4)
    assert found.seconds == pytest.approx(seconds)
    assert found.accelerator_hours == {"gpus": pytest.approx(4 * seconds / 3600)}
    assert found.source == "rates"
    assert any("by the stated rates; 0.12 GPU hours" in line for line in found.lines())


def test_an_open_loop_takes_at_least_as_long_as_its_requests_are_offered() -> None:
    rates = {"startup_s": 1, "prefill_tokens_per_s": 1e6, "itl_ms": 0.001}
    slow = {"input_tokens": 100, "output_tokens": 8, "request_rate": 0.5, "concurrency": [4]}
    found = estimate(flow(rates=rates, layouts={"agg": GOOD["layouts"]["agg"]}, workloads={"long": slow}))
    assert found.seconds == pytest.approx(1 + 40 / 0.5, rel=0.01)


def test_cells_measured_before_give_the_time_of_the_others() -> None:
    one = flow(layouts={"agg": GOOD["layouts"]["agg"]}, rates={"startup_s": 10})
    first, second = one.cells.ids
    measure(one, first, 22.0)
    found = estimate(one)
    # 11 requests took 22 s; the other cell has 22 requests; the layout starts once more.
    assert (found.todo, found.starts, found.source) == (1, 1, "cells")
    assert found.seconds == pytest.approx(44 + 10)
    assert found.accelerator_hours == {"cores": pytest.approx(2 * 54 / 3600)}
    measure(one, second, 40.0)
    done = estimate(one)
    assert (done.todo, done.seconds, done.starts) == (0, 0.0, 0)
    assert next(iter(done.lines())).startswith("0 of 2 cells")


def test_samples_against_percentiles_with_advice() -> None:
    text = Support("8k-1k", 32, 99.0, 320, 368, 1).text
    assert text.startswith("8k-1k: c=32 gives 320 requests; P99 needs 368")
    assert "send 368 prompts or more in a run (prompts: {per_concurrency: 12}, or {percentile: 99})" in text
    assert Support("w", 32, 99.0, 960, 368, 3).text == "w: c=32 gives 960 requests in 3 runs; P99 needs 368"
    assert Support("w", 1, 99.0, 30, 368, 3).prompts_needed == 123


def test_the_percentiles_are_those_that_somebody_asks_for() -> None:
    claim = {
        "says": "x",
        "tests": [
            {
                "metric": "itl_ms",
                "statistic": ["p90", "mean"],
                "relation": "grows",
                "workload": "long",
                "layout": "pd",
            }
        ],
    }
    one = flow(
        claims={"one": claim}, slo={"percentile": 95}, figures={"itl_of_layouts": {"percentiles": [50]}}
    )
    assert wanted_percentiles(one.experiment) == [50.0, 90.0, 95.0]


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(json.dumps(GOOD))
    assert main(["estimate", "--configfile", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "8 of 8 cells are to be measured, with 4 starts of a layout" in printed
    assert "long: c=1 gives 10 requests; P99 needs 368" in printed
    assert "set matrix.restarts to 3" in printed


def test_the_last_word_of_a_run_names_the_report_that_it_made() -> None:
    one = flow()
    assert last_word(one) is None
    report = Path(one.path("report.html"))
    report.parent.mkdir(parents=True)
    report.write_text("made now", encoding="utf-8")
    assert last_word(one) == f"done; open {report}"
    os.utime(report, (1, 1))  # of an earlier run
    assert last_word(one) is None
