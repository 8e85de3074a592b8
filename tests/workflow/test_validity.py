# SPDX-License-Identifier: Apache-2.0
"""The checks within the workflow, on stubbed engines: a layout that breaks after its start is not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from splitbench.workflow import Workflow
from tests.fakes.layouts import free_ports
from tests.workflow.flow import Flow, default_config, stub_python


def small(python: Path) -> dict[str, Any]:
    """One workload at one load."""
    config = default_config(python, free_ports(1)[0])
    del config["workloads"]["short"]
    config["matrix"] = {"concurrency": [2]}
    config["figures"] = {}
    return config


def test_a_layout_that_loads_nothing_is_refused_and_the_other_is_measured(tmp_path: Path) -> None:
    python = stub_python(tmp_path / "python")
    config = small(python)
    # The session's own first completions still pass; the smoke test comes after them.
    config["layouts"]["pd"]["env"] = {"VLLM_STUB_BROKEN_AFTER": "2"}
    flow = Flow(tmp_path / "flow", python, config=config)
    finished = flow.run("--keep-going", "cells")
    assert finished.returncode != 0
    assert "failed its smoke test and is not measured: kv-moved: decoders hit" in finished.stderr
    assert "a hit is not a load" in finished.stderr
    status = {name.partition("-")[0]: state for name, state in flow.status().items()}
    assert status == {"pd": "failed", "agg": "completed"}
    (record,) = flow.results.glob("cells/*/*/*/*/record.json")
    folder = record.parent
    # What is kept with a cell is enough to check it.
    part = flow.run(f"results/tiny/parts/{folder.relative_to(flow.results / 'cells')}/checks.json")
    assert part.returncode == 0, part.stdout + part.stderr
    (checks,) = flow.results.glob("parts/*/*/*/*/checks.json")
    found = {check["name"]: check for check in json.loads(checks.read_text())["checks"]}
    assert {"load", "client", "machine", "server-log", "samples"} <= set(found)
    assert found["server-log"]["verdict"] == "ok"
    telemetry = pq.read_table(checks.with_name("telemetry.parquet")).to_pandas()
    assert "engine:engine-0" in set(telemetry["source"])
    assert flow.gone() == []


def test_invalid_cells_of_an_earlier_run_are_measured_again(tmp_path: Path) -> None:
    python = stub_python(tmp_path / "python")
    config = small(python)
    del config["layouts"]["pd"]
    config["thresholds"] = {"load_percent": 1000}  # more in flight than the cap: never reached
    flow = Flow(tmp_path / "flow", python, config=config)
    target = f"results/tiny/parts/{Workflow(config).cells.all[0].cell_id}/checks.json"
    assert flow.run(target).returncode == 0
    checks = flow.folder / target
    assert json.loads(checks.read_text())["verdict"] == "invalid"
    (record,) = flow.results.glob("cells/*/*/*/*/record.json")
    first = record.read_text()
    config["thresholds"] = {}
    again = ("--config", "on_invalid=rerun")
    assert flow.run("-n", target, *again).returncode == 0
    assert record.read_text() == first
    finished = flow.run(target, *again)
    assert finished.returncode == 0, finished.stderr
    assert "is invalid and measured again" in finished.stderr
    assert record.read_text() != first
    assert (record.parent / "rejected" / "record.json").read_text() == first
