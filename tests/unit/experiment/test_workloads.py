# SPDX-License-Identifier: Apache-2.0
"""Kinds of workloads: what the client is told, what results are keyed by, which combinations are refused."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from splitbench.errors import UserError
from splitbench.experiment.cells import Cell, Cells, prompts_for
from splitbench.experiment.load import load_experiment
from splitbench.experiment.models import Workload
from splitbench.measuring.command import bench_command
from splitbench.measuring.prompts import check_file, write_prompts_of_lines
from splitbench.statistics.quantiles import needed
from tests.fakes.experiments import GOOD

SHA = "0" * 64


def cells_of(**workload: Any) -> list[Cell]:
    config = copy.deepcopy(GOOD)
    config["workloads"] = {"w": {"input_tokens": 100, "output_tokens": 8, **workload}}
    return list(Cells(load_experiment(config), Path()).all)


def told(*, warm_up: bool = False, **workload: Any) -> dict[str, str]:
    """Flags of the measured run (or the warm-up) with their values; flags without one have an empty text."""
    argv = bench_command(
        cells_of(**workload)[0],
        base_url="http://h:1",
        tokenizer="t",
        prompts=4,
        seed=9,
        result=None if warm_up else Path("/r/bench.json"),
        dataset=Path("/data/file"),
    )
    found: dict[str, str] = {}
    for flag, value in zip(argv, [*argv[1:], "--"], strict=True):
        if flag.startswith("--"):
            assert flag not in found, flag
            found[flag.removeprefix("--")] = "" if value.startswith("--") else value
    return found


def test_fixed_and_ranged_lengths() -> None:
    fixed = told()
    assert (fixed["dataset-name"], fixed["random-input-len"], fixed["random-range-ratio"]) == (
        "random",
        "100",
        "0",
    )
    assert (fixed["request-rate"], fixed["ignore-eos"]) == ("inf", "")
    assert "burstiness" not in fixed
    assert told(range_ratio=0.25)["random-range-ratio"] == "0.25"
    shared = told(prefix_tokens=30)
    assert (shared["random-prefix-len"], shared["random-input-len"]) == ("30", "70")


def test_shared_beginnings() -> None:
    found = told(dataset="prefix-repetition", prefixes=5, prefix_tokens=60)
    assert found["dataset-name"] == "prefix_repetition"
    assert found["prefix-repetition-num-prefixes"] == "5"
    assert (found["prefix-repetition-prefix-len"], found["prefix-repetition-suffix-len"]) == ("60", "40")


@pytest.mark.parametrize(
    ("dataset", "name"), [("sharegpt", "sharegpt"), ("custom", "custom"), ("sonnet", "custom")]
)
def test_files_are_read_by_the_client_and_warm_ups_are_made_up(dataset: str, name: str) -> None:
    workload = {"dataset": dataset, "path": "f", "sha256": SHA}
    found = told(**workload)
    assert (found["dataset-name"], found["dataset-path"]) == (name, "/data/file")
    assert found.get("custom-output-len", "8") == "8"
    before = told(warm_up=True, **workload)
    assert (before["dataset-name"], before["random-input-len"]) == ("random", "100")
    assert "dataset-path" not in before


def test_open_loops_and_ramps() -> None:
    open_loop = told(request_rate=2.5, burstiness=0.5)
    assert (open_loop["request-rate"], open_loop["burstiness"]) == ("2.5", "0.5")
    assert told(warm_up=True, request_rate=2.5)["request-rate"] == "inf"
    ramp = told(ramp={"start_rate": 1, "end_rate": 9})
    assert (ramp["ramp-up-strategy"], ramp["ramp-up-start-rps"], ramp["ramp-up-end-rps"]) == (
        "linear",
        "1",
        "9",
    )
    assert "request-rate" not in ramp


def test_a_workload_may_have_caps_of_its_own() -> None:
    assert {cell.concurrency for cell in cells_of()} == {1, 2}
    capped = cells_of(concurrency=[256])
    assert {cell.concurrency for cell in capped} == {256}
    assert capped[0].workload_key == cells_of()[0].workload_key


def test_percentiles_set_a_floor_for_prompts() -> None:
    for percentile in (50.0, 90.0, 95.0, 99.0, 99.5, 99.9):
        assert prompts_for(percentile) == needed(percentile / 100)
    assert {cell.prompts for cell in cells_of(prompts={"percentile": 99})} == {368}
    assert {cell.prompts for cell in cells_of(prompts={"percentile": 50, "per_concurrency": 30})} == {30, 60}


def test_results_of_before_keep_their_key() -> None:
    # The digests that these workloads had before there were other kinds.
    assert cells_of()[0].workload_key == KNOWN
    same = {"range_ratio": 0, "burstiness": 1, "dataset": "random", "prefix_tokens": 0}
    assert cells_of(**same)[0].workload_key == KNOWN
    others = [
        {"range_ratio": 0.5},
        {"request_rate": 1},
        {"prefix_tokens": 1},
        {"prompts": {"percentile": 90}},
    ]
    keys = {cells_of(**other)[0].workload_key for other in others}
    assert len(keys | {KNOWN}) == 5


KNOWN = "w-5ea32890"


def test_files_count_by_their_content() -> None:
    here, there = (
        cells_of(dataset="custom", path=path, sha256=SHA)[0].workload_key for path in ("a.jsonl", "b/c.jsonl")
    )
    assert here == there
    assert here != cells_of(dataset="custom", path="a.jsonl", sha256="1" * 64)[0].workload_key


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dataset": "custom"}, "is a file: give 'path' and its 'sha256'"),
        ({"path": "x", "sha256": SHA}, "reads no file"),
        ({"dataset": "sharegpt", "path": "x", "sha256": SHA, "range_ratio": 0.1}, "'range_ratio' is for"),
        ({"dataset": "prefix-repetition"}, "go together"),
        ({"prefixes": 3}, "go together"),
        ({"prefix_tokens": 100}, "leaves nothing of 100"),
        ({"dataset": "custom", "path": "x", "sha256": SHA, "prefix_tokens": 1}, "is for made-up prompts"),
        ({"burstiness": 0.5}, "give 'request_rate' or 'ramp'"),
        ({"request_rate": 1, "ramp": {"start_rate": 1, "end_rate": 2}}, "not both"),
        ({"extra_args": {"ramp-up-strategy": "linear"}}, "is set by the plan"),
        ({"extra_args": {"custom-output-len": 3}}, "is set by the plan"),
    ],
)
def test_combinations_that_mean_nothing(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Workload(input_tokens=100, output_tokens=8, **fields)


def test_a_dataset_is_the_stated_one(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    with pytest.raises(UserError, match="can't be read"):
        check_file(path, SHA, "workloads.w")
    path.write_text("x")
    right = hashlib.sha256(b"x").hexdigest()
    with pytest.raises(UserError, match=f"another sha256 than the config states: {right}"):
        check_file(path, SHA, "workloads.w")
    check_file(path, right, "workloads.w")


def test_prompts_of_lines(tmp_path: Path) -> None:
    lines = tmp_path / "sonnets.txt"
    lines.write_text("\n".join(f"line {n} of a poem that has some words\n" for n in range(50)))
    made = []
    for seed in (1, 1, 2):
        write_prompts_of_lines(
            lines, tmp_path / "p.jsonl", seed=seed, count=20, input_tokens=100, output_tokens=7
        )
        made.append([json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()])
    assert made[0] == made[1] != made[2]
    assert {row["output_tokens"] for row in made[0]} == {7}
    assert all(70 <= len(row["prompt"].split()) <= 85 for row in made[0])
    assert len({row["prompt"] for row in made[0]}) == 20
    lines.write_text("\n \n")
    with pytest.raises(UserError, match="no line of text"):
        write_prompts_of_lines(lines, tmp_path / "q", seed=1, count=1, input_tokens=9, output_tokens=1)
    assert not (tmp_path / "q").exists()
