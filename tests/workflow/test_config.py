# SPDX-License-Identifier: Apache-2.0
"""A wrong config ends the workflow at once: one line a problem, exit code 1, nothing started or written."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.workflow.flow import Flow

MISTAKES: list[tuple[str, Any, str]] = [
    ("layouts/agg/tpp", 2, "layouts.agg.tpp: unknown key; did you mean 'tp'?"),
    ("workloads/long/input_tokens", "many", "workloads.long.input_tokens: input should be a valid integer"),
    (
        "layouts/pd/decode",
        {"cores": [0]},
        "layouts.pd: core 0 is used by two engines; give each engine its own",
    ),
    ("matrix/concurrency", [], "matrix.concurrency: list should have at least 1 item"),
    ("layouts/agg/port", 80, "layouts.agg.port: input should be greater than or equal to 1024"),
    (
        "model",
        {"name": "m", "path": "no/such/model"},
        "model.path: no/such/model does not exist; check the path",
    ),
    ("stack", {"name": "s", "lock": "no.lock"}, "stack.lock: no.lock does not exist; check the path"),
]


@pytest.mark.parametrize(("path", "value", "line"), MISTAKES)
def test_one_line_and_exit_code_1(flow: Flow, path: str, value: Any, line: str) -> None:
    done = flow.run(config=flow.edited(path, value))
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert line in output
    assert "Traceback" not in output
    ours = [text for text in output.splitlines() if text.startswith("splitbench: error: ")]
    assert len(ours) == 1
    assert not flow.results.exists()
    assert not (flow.folder / "store").exists()


def test_text_that_is_not_yaml(flow: Flow) -> None:
    done = flow.run(text="layouts: [")  # snakemake reads it before we can, and its words don't name the file
    assert done.returncode == 1
    assert "not valid JSON or YAML" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_an_experiment_of_its_own_does_not_inherit_the_demo(flow: Flow) -> None:
    done = flow.run("-n", "plans", "first")
    assert "agg-2core" not in done.stdout + done.stderr
    # `first` is one cell of each layout.
    assert re.search(r"^cell +2$", done.stdout + done.stderr, re.MULTILINE)


def test_plans_need_neither_engines_nor_devices(flow: Flow) -> None:
    config = flow.edited("layouts", {"big": {"kind": "aggregated", "gpus": [0, 1, 2, 3, 4, 5, 6, 7]}})
    config["stack"]["python"] = str(flow.folder / "not" / "there")
    done = flow.run("plans", config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = yaml.safe_load((flow.results / "plans" / "big.json").read_text(encoding="utf-8"))
    assert plan["budget"] == {"kind": "gpus", "count": 8, "share": None}
    assert not (flow.folder / "store").exists()
