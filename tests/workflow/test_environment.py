# SPDX-License-Identifier: Apache-2.0
"""The check of the environment as a user meets it: it stops a run early, or the run goes on and says so."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.workflow.flow import Flow


def expecting(flow: Flow, **entries: object) -> None:
    """Let the experiment expect something of the machine."""
    file = flow.folder / "stack.yaml"
    file.write_text(yaml.safe_dump({"name": "strict", "expects": entries}), encoding="utf-8")
    flow.config = flow.edited("stack/expects", str(file))


def check_file(flow: Flow) -> Path:
    (probe,) = flow.results.glob("environment/probe-*.json")
    return probe.with_name(probe.name.replace("probe-", "check-"))


def test_a_machine_that_does_not_fit_stops_the_run_before_any_engine(flow: Flow) -> None:
    expecting(flow, gpus={"minimum": 64}, kernel="record")
    stopped = flow.run()
    shown = stopped.stdout + stopped.stderr
    assert stopped.returncode == 1
    assert "gpus is 0, expected >= 64" in shown and "--config check=warn" in shown
    assert "Traceback" not in shown
    assert flow.status() == {} and not check_file(flow).exists()
    log = next(flow.results.glob("logs/environment/check-*.log")).read_text(encoding="utf-8")
    assert "expected" in log and "mismatch" in log

    went_on = flow.run("--config", "check=warn", "--until", "check")
    assert went_on.returncode == 0, went_on.stdout + went_on.stderr
    record = json.loads(check_file(flow).read_text(encoding="utf-8"))
    assert record["went_on"] is True and record["fits"] is False
    # Back to the strict way: what was let pass is looked at again, before a cell.
    again = flow.run("cells")
    assert again.returncode == 1 and "gpus is 0, expected >= 64" in again.stdout + again.stderr
    assert set(flow.status().values()) <= {"failed"} and not list(
        flow.results.glob("cells/*/*/*/*/record.json")
    )


def test_a_stack_file_with_a_mistake_is_one_line(flow: Flow) -> None:
    expecting(flow, gpuss={"minimum": 1})
    stopped = flow.run("-n")
    shown = stopped.stdout + stopped.stderr
    assert stopped.returncode == 1 and "did you mean 'gpus'?" in shown and "Traceback" not in shown


def test_what_is_expected_runs_no_cell_again(finished: Flow) -> None:
    file = finished.folder / "expects.yaml"
    file.write_text("name: x\nexpects: {cores: {minimum: 1}}\n", encoding="utf-8")
    planned = finished.planned(config=finished.edited("stack/expects", str(file)))
    assert planned == {"report": 1}
    assert finished.planned(config=finished.edited("check", "warn")) == {"report": 1}


def test_what_is_expected_hides_no_other_edit(finished: Flow) -> None:
    config = finished.edited("layouts/agg/args", {"max-num-seqs": 7}) | {"check": "warn"}
    planned = finished.planned(config=config)
    assert (planned["cell"], planned["part"]) == (4, 4)
    config = finished.edited("thresholds/kv_moved_percent", 90) | {"check": "warn"}
    assert finished.planned(config=config)["part"] == 8


def test_cells_point_to_the_environment_they_ran_in(finished: Flow) -> None:
    records = list(finished.results.glob("cells/*/*/*/*/record.json"))
    digests = {json.loads(path.read_text(encoding="utf-8"))["environment_digest"] for path in records}
    assert len(records) == 8 and len(digests) == 1
    (digest,) = digests
    kept = json.loads((finished.results / f"environment/kept/{digest[:16]}.json").read_text(encoding="utf-8"))
    assert kept["digest"] == digest and kept["software"]["packages"]["vllm"]
    page = (finished.results / "report.html").read_text(encoding="utf-8")
    assert "checked against the experiment" in page
