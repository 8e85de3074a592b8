# SPDX-License-Identifier: Apache-2.0
"""What is left, lost and said when engines, cells or the workflow itself end too early."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from splitbench.files import sha256_file
from tests.workflow.flow import Flow

# A campaign by hand raises this: SPLITBENCH_TEST_TRIES=10 pytest tests/workflow/test_workflow_faults.py
TRIES = int(os.environ.get("SPLITBENCH_TEST_TRIES", "1"))


CELLS = 4


@pytest.fixture
def flow(flow: Flow) -> Flow:
    """Two layouts, two loads, one workload: enough to be in the middle of."""
    del flow.config["workloads"]["short"]
    return flow


def assert_results_are_complete(flow: Flow) -> int:
    """Every cell that looks complete is: all files there, and the client's result is the one recorded."""
    records = sorted(flow.results.glob("cells/*/*/*/*/record.json"))
    for path in records:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert sha256_file(path.with_name("bench.json")) == record["bench_sha256"]
        assert record["completed"] == record["prompts"]
        for name in ("cell.json", "metrics.json", "engine_facts.json"):
            json.loads(path.with_name(name).read_text(encoding="utf-8"))
    assert not list(flow.results.glob("**/*.part"))
    return len(records)


def sessions(flow: Flow, layout: str) -> list[Path]:
    """Folders of the bring-ups of a layout."""
    return sorted(flow.results.glob(f"logs/sessions/{layout}-*/*"))


def test_an_engine_that_does_not_start_is_named_with_its_last_words_and_tried_once(flow: Flow) -> None:
    broken = flow.edited("layouts/agg/env", {"VLLM_STUB_DIE_EARLY": "ValueError: no room for the KV cache"})
    done = flow.run("cells", config=broken)
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert "engine-0" in output
    assert "ValueError: no room for the KV cache" in output
    assert "Traceback" not in output
    assert len(sessions(flow, "agg")) == 1
    statuses = flow.status()
    assert {status for cell, status in statuses.items() if cell.startswith("pd-")} == {"completed"}
    assert {status for cell, status in statuses.items() if cell.startswith("agg-")} == {"failed"}
    assert flow.gone() == []
    assert assert_results_are_complete(flow) == CELLS // 2
    assert flow.run("cells").returncode == 0  # mended: the other layout's cells are still there
    assert assert_results_are_complete(flow) == CELLS


@pytest.mark.parametrize("attempt", range(TRIES))
def test_success_leaves_no_process(flow: Flow, attempt: int) -> None:
    assert flow.run("cells").returncode == 0
    assert flow.gone(5) == []
    assert assert_results_are_complete(flow) == CELLS


@pytest.mark.parametrize("attempt", range(TRIES))
def test_a_failing_cell_leaves_the_others_and_no_process(flow: Flow, attempt: int) -> None:
    dying = flow.edited(
        "layouts/agg/env", {"VLLM_STUB_DIE_AFTER_REQUESTS": str(5 + attempt % 6), "VLLM_STUB_CHILDREN": "2"}
    )
    done = flow.run("cells", config=dying)
    assert done.returncode == 1
    assert "engine-0" in done.stdout + done.stderr
    statuses = flow.status()
    assert {status for cell, status in statuses.items() if cell.startswith("pd-")} == {"completed"}
    assert "failed" in statuses.values()
    assert flow.gone() == []
    assert_results_are_complete(flow)


@pytest.mark.parametrize("attempt", range(TRIES))
@pytest.mark.parametrize("how", ["interrupt", "terminate", "kill"])
def test_whatever_ends_the_workflow_nothing_is_left_and_the_rerun_finishes(
    flow: Flow, how: str, attempt: int
) -> None:
    chance = random.Random(f"{how}/{attempt}")
    slow = flow.edited("engine/env", {"VLLM_STUB_STEP_MS": "20", "VLLM_STUB_CHILDREN": "1"})
    running = flow.start("cells", config=slow)
    wait_for_cells(flow, chance.choice([0, 1, 2]))
    time.sleep(chance.uniform(0, 1.5))
    if how == "interrupt":
        os.killpg(running.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
    elif how == "terminate":
        running.terminate()
    else:
        running.kill()
    code = running.wait(timeout=90)
    assert code != 0
    assert flow.gone(40) == []
    before = assert_results_are_complete(flow)
    assert before < CELLS
    if how == "kill":  # snakemake could not take its own lock away, and says so
        assert "--unlock" in (refused := flow.run("cells", config=slow)).stdout + refused.stderr
        assert flow.run("--unlock", config=slow).returncode == 0
    done = flow.run("cells", config=slow)
    assert done.returncode == 0, done.stdout + done.stderr
    assert assert_results_are_complete(flow) == CELLS
    assert flow.planned("cells", config=slow) == {}


def wait_for_cells(flow: Flow, count: int, limit_s: float = 90) -> None:
    """Wait until the first cell was started and this many are complete."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        statuses = flow.status()
        if statuses and list(statuses.values()).count("completed") >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"no {count} cells after {limit_s} s: {(flow.folder / 'run.log').read_text()}")


def test_two_workflows_on_one_machine_take_turns(flow: Flow, tmp_path: Path, stub: Path) -> None:
    other = Flow(tmp_path / "other", stub, config=flow.config)
    other.state = flow.state
    both = [flow.start("cells"), other.start("cells")]
    assert [each.wait(timeout=280) for each in both] == [0, 0]
    intervals = []
    for folder in (flow, other):
        assert assert_results_are_complete(folder) == CELLS
        for path in folder.results.glob("cells/*/*/*/*/record.json"):
            record = json.loads(path.read_text(encoding="utf-8"))
            intervals.append((record["started_at"], record["ended_at"]))
    intervals.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(intervals))
