# SPDX-License-Identifier: Apache-2.0
"""`splitbench init`: what it writes can be checked and planned, on any machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from splitbench.cli import main
from splitbench.errors import UserError
from splitbench.experiment.starter import installed_versions, starter
from splitbench.workflow import REPOSITORY, Workflow


def planned(text: str) -> Workflow:
    """What Snakemake does with a config before it runs anything."""
    return Workflow(yaml.safe_load(text), [], REPOSITORY)


def text_for(**changes: object) -> str:
    given: dict[str, object] = {"gpus": 0, "cores": [0, 1], "python": Path("no/python"), "model": None}
    return starter("mine", "../schema.json", **(given | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "budgets"), [(1, {1}), (2, {2}), (3, {2}), (4, {2, 4}), (6, {2, 4}), (8, {4, 8})]
)
def test_gpus_give_arms_of_equal_budgets(gpus: int, budgets: set[int]) -> None:
    plans = planned(text_for(gpus=gpus)).cells.plans
    assert {plan.budget.count for plan in plans.values()} == budgets
    for budget in budgets:
        kinds = {plan.kind for plan in plans.values() if plan.budget.count == budget}
        assert kinds == ({"aggregated", "pd"} if gpus == 1 else {"aggregated", "replicas", "pd"})


@pytest.mark.parametrize(
    ("cores", "budget"), [([0, 1], 2), ([0, 1, 2], 2), ([0, 2, 4, 6], 2), (list(range(9)), 8)]
)
def test_cores_are_those_that_may_be_used(cores: list[int], budget: int) -> None:
    flow = planned(text_for(cores=cores))
    used = {
        core
        for layout in flow.experiment.layouts.values()
        for each in layout.engines()
        for core in each.devices
    }
    assert used <= set(cores)
    assert {plan.budget.count for plan in flow.cells.plans.values()} == {budget}


def test_one_core_is_refused_with_a_way_out() -> None:
    with pytest.raises(UserError, match="--gpus N"):
        text_for(cores=[0])


def test_every_section_is_commented_and_editors_find_the_schema() -> None:
    for text in (text_for(), text_for(gpus=8)):
        assert text.startswith("# yaml-language-server: $schema=../schema.json\n")
        for section in ("stack", "layouts", "workloads", "matrix", "slo"):
            assert re.search(rf"^# .*\n(# .*\n)*{section}:", text, re.MULTILINE), section


def test_the_command_writes_once_and_its_result_passes_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    file = tmp_path / "deep" / "mine.yaml"
    assert main(["init", str(file), "--gpus", "4", "--model", "owner/Name-7B"]) == 0
    assert main(["config", "check", str(file)]) == 0
    assert "experiment 'mine' with 72 cells" in capsys.readouterr().out
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert config["model"] == {"name": "name-7b", "hub": "owner/Name-7B"}
    assert main(["init", str(file)]) == 1
    assert "exists already; name another file, or say --force" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "bad name.yaml"), "--gpus", "2"]) == 1
    assert "name in paths" in capsys.readouterr().err
    assert not (tmp_path / "bad name.yaml").exists()


def test_versions_come_from_the_serving_environment(tmp_path: Path) -> None:
    info = tmp_path / "vllm-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n", encoding="utf-8")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    assert installed_versions(python)["vllm"] == "9.9"
    assert yaml.safe_load(text_for(gpus=2, python=python))["stack"]["packages"]["vllm"] == "9.9"
    assert installed_versions(tmp_path / "none") == {}
    assert yaml.safe_load(text_for(gpus=2))["stack"] == {"name": "cuda", "lock": "envs/serving-cuda.lock"}
