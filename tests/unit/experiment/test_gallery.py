# SPDX-License-Identifier: Apache-2.0
"""Every experiment of the gallery passes the check and can be planned; its comments tell the truth about budgets."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from splitbench.cli import main
from splitbench.experiment.load import read_experiment, read_yaml
from splitbench.measuring import conversations
from splitbench.measuring.prompts import check_file
from splitbench.workflow import REPOSITORY, Workflow

GALLERY = [
    REPOSITORY / "config" / "config.yaml",
    *sorted((REPOSITORY / "config" / "experiments").glob("*.yaml")),
]


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_it_can_be_checked_and_planned(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert main(["config", "check", str(path.relative_to(REPOSITORY))]) == 0
    cells = re.search(r"with (\d+) cells", capsys.readouterr().out)
    assert cells is not None
    # What the Snakefile does when it is read.
    flow = Workflow(read_yaml(path), [path], REPOSITORY)
    assert len(flow.cells) == int(cells[1])
    assert path.stem in (flow.experiment.experiment, "config")
    for name in flow.experiment.layouts:
        assert flow.plan_text(name)
    first = [flow.cells[cell] for cell in flow.first_cells]
    assert [cell.layout for cell in first] == list(flow.experiment.layouts)
    assert {cell.concurrency for cell in first} == {min(cell.concurrency for cell in flow.cells.all)}
    budgets = [(plan.budget.kind, plan.budget.count) for plan in flow.cells.plans.values()]
    alone = {budget for budget in budgets if budgets.count(budget) == 1}
    # An arm without another one of its budget is compared with nothing; the reference has one on purpose (2p1d).
    assert len(alone) == (1 if path.stem == "sakura-h100" else 0)


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_every_figure_marks_percentiles_of_the_slo(path: Path) -> None:
    flow = Workflow(read_yaml(path), [path], REPOSITORY)
    for name, figure in flow.experiment.figures.items():
        if name.endswith("against_concurrency"):
            assert figure.percentiles[-1] == flow.experiment.slo.percentile, name


def test_made_conversations_are_what_the_gallery_states(tmp_path: Path) -> None:
    workloads = read_experiment(REPOSITORY / "config/experiments/cores-chat.yaml").workloads
    file = tmp_path / "made.json"
    conversations.main([str(file)])
    for name, workload in workloads.items():
        assert workload.sha256 is not None
        check_file(file, workload.sha256, f"workloads.{name}")
    made = json.loads(file.read_text(encoding="utf-8"))
    lengths = [[len(turn["value"].split()) for turn in one["conversations"]] for one in made]
    assert max(prompt + answer for prompt, answer in lengths) < 1024
    assert abs(statistics.fmean(prompt for prompt, _ in lengths) - 160) < 16
    assert abs(statistics.fmean(answer for _, answer in lengths) - 35) < 4
    assert len({one["conversations"][0]["value"] for one in made}) == len(made)


def test_the_folder_and_its_description_agree() -> None:
    text = (REPOSITORY / "config" / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `experiments/([\w.-]+\.yaml)`", text, re.MULTILINE))
    assert listed == {path.name for path in (REPOSITORY / "config" / "experiments").glob("*.yaml")}
