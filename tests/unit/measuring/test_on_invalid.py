# SPDX-License-Identifier: Apache-2.0
"""What becomes of a cell that fails a check: kept, measured again, or the end of the run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitbench.errors import UserError
from splitbench.measuring import stage
from splitbench.measuring.evidence import Check
from splitbench.workflow import Workflow
from tests.fakes.experiments import GOOD

INVALID = [Check("kv-moved", "invalid", "decoders loaded nothing"), Check("load", "ok", "")]
SOUND = [Check("kv-moved", "ok", "")]


def measured(
    choice: str, verdicts: list[list[Check]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[str]]:
    """How often a cell was measured whose checks say this, one list a time, and what a person was told."""
    config: dict[str, Any] = copy.deepcopy(GOOD) | {"on_invalid": choice}
    config["stack"]["python"] = str(folder / "python")
    (folder / "python").write_text("")
    monkeypatch.chdir(folder)
    flow = Workflow(config)
    cell = flow.cells.all[0]
    runs: list[int] = []

    def run_cell(_: Any, files: Any, **__: Any) -> None:
        runs.append(1)
        files.folder.mkdir(parents=True, exist_ok=True)
        for name in ("slice", "bench", "metrics", "telemetry", "logs", "engine_facts"):
            getattr(files, name).write_text("{}")
        files.record.write_text(json.dumps({"started_at": "now", "total_s": 1}))

    for name in ("ensure_serving", "ensure_model", "check_cores", "environment_now"):
        monkeypatch.setattr(stage, name, lambda *_: None)
    monkeypatch.setattr(stage, "run_cell", run_cell)
    monkeypatch.setattr(stage, "judge", lambda *_: verdicts[len(runs) - 1])
    monkeypatch.setattr(stage, "_standing", lambda *_: SimpleNamespace(line=lambda: ""))
    monkeypatch.delenv("SPLITBENCH_OWNER", raising=False)
    said: list[str] = []
    stage.measure_cell(flow, cell.cell_id, environment=folder, log=folder / "a.log", note=said.append)
    return len(runs), [line for line in said if line]


def test_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured("keep", [INVALID], tmp_path, monkeypatch) == (1, [])


def test_measured_again_until_it_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, said = measured("rerun", [INVALID, SOUND], tmp_path, monkeypatch)
    assert runs == 2
    assert said == ["the cell is invalid and measured again: kv-moved: decoders loaded nothing"]


def test_measured_three_times_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, said = measured("rerun", [INVALID] * 3, tmp_path, monkeypatch)
    assert runs == 3
    assert "kept, since it was measured often enough" in said[-1]


def test_the_end_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="the cell is invalid: kv-moved: decoders loaded nothing"):
        measured("stop", [INVALID], tmp_path, monkeypatch)
    (aside,) = tmp_path.glob("results/tiny/cells/*/*/*/*/rejected")
    assert len(list(aside.iterdir())) == 7
    assert json.loads((aside.parent / "status.json").read_text())["why"].startswith("invalid: kv-moved")


def test_the_end_of_the_run_only_for_invalid_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured("stop", [SOUND], tmp_path, monkeypatch) == (1, [])


def test_invalid_cells_of_an_earlier_run_are_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured("keep", [INVALID], tmp_path, monkeypatch)
    flow = Workflow(copy.deepcopy(GOOD) | {"stack": GOOD["stack"] | {"python": str(tmp_path / "python")}})
    cell = flow.cells.all[0].cell_id
    part = Path(flow.path(f"parts/{cell}/checks.json"))
    assert not stage.set_aside_if_invalid(flow, cell)  # not checked yet
    part.parent.mkdir(parents=True)
    for verdict, expected in (("ok", False), ("warn", False), ("invalid", True), ("invalid", False)):
        part.write_text(json.dumps({"verdict": verdict}))
        assert stage.set_aside_if_invalid(flow, cell) is expected
    folder = Path(flow.path(f"cells/{cell}"))
    assert not (folder / "record.json").exists()
    assert (folder / "rejected" / "record.json").exists()
