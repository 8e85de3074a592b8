# SPDX-License-Identifier: Apache-2.0
"""`snakemake archive`, and going on from what it wrote."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from splitbench.archive.verify import restore, verify
from tests.workflow.flow import Flow


@pytest.fixture(scope="module")
def archive(finished: Flow) -> Path:
    """The archive of the finished run."""
    done = finished.run("archive")
    assert done.returncode == 0, done.stdout + done.stderr
    return finished.results / "tiny.zip"


def test_the_archive_of_a_run_holds(archive: Path) -> None:
    found = verify(archive)
    assert not found.differs
    assert len(found.passed) == 6


def test_a_restored_archive_has_nothing_to_do_and_an_edited_layout_plans_its_cells(
    archive: Path, finished: Flow, tmp_path: Path
) -> None:
    back = restore(archive, tmp_path / "back")
    assert _planned(finished, back) == {}
    # Now snakemake also knows what each result was made with.
    assert _run(finished, back, "--touch", "--forceall").returncode == 0
    assert _planned(finished, back) == {}
    config = yaml.safe_load((back / "experiment.yaml").read_text())
    edited = config | {
        "layouts": {**config["layouts"], "agg": {**config["layouts"]["agg"], "args": {"max-num-seqs": 16}}}
    }
    (back / "experiment.yaml").write_text(yaml.safe_dump(edited))
    planned = _planned(finished, back)
    assert {name: planned.get(name) for name in ("plan", "cell", "part")} == {"plan": 1, "cell": 4, "part": 4}
    (back / "experiment.yaml").write_text(yaml.safe_dump(config | {"slo": {"itl_ms": 50}}))
    assert _planned(finished, back) == {"statistics": 1, "report": 1}


def _run(flow: Flow, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = flow.command(*arguments)
    command[command.index("--snakefile") + 1] = str(folder / "workflow" / "Snakefile")
    command[command.index("--directory") + 1] = str(folder)
    command[command.index("--configfile") + 1] = str(folder / "experiment.yaml")
    return flow.run_command(command)


def _planned(flow: Flow, folder: Path) -> dict[str, int]:
    shown = _run(flow, folder, "-n", "--quiet", "rules")
    text = shown.stdout + shown.stderr
    assert shown.returncode == 0, text
    table = re.findall(r"^([a-z_]+)\s+(\d+)$", text, re.MULTILINE)
    return {name: int(count) for name, count in table if name not in ("total", "all")}
