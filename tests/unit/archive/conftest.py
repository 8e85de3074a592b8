# SPDX-License-Identifier: Apache-2.0
"""One set of finished results and its archive for all tests of the archive; tests may only look."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitbench.archive.build import build_archive
from splitbench.workflow import Workflow
from tests.fakes.finished_results import finish, small_config


@dataclass(frozen=True)
class Finished:
    """A finished experiment and its archive."""

    folder: Path
    root: Path
    flow: Workflow
    config: dict[str, Any]
    archive: Path
    index: dict[str, Any]

    def build(self, output: Path, **options: Any) -> dict[str, Any]:
        """Another archive of the same results."""
        return build_archive(
            self.flow,
            self.config,
            "--configfile experiment.yaml",
            output,
            folder=self.folder,
            **({"known": {}} | options),
        )


def git(folder: Path, *arguments: str) -> None:
    """Run git as an author who is not of this machine."""
    who = ("-c", "user.name=author", "-c", "user.email=author@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small repository in place of the workflow's own."""
    root = tmp_path_factory.mktemp("repository")
    (root / "rules").mkdir()
    (root / "Snakefile").write_text("# the workflow\n", encoding="utf-8")
    (root / "rules" / "common.smk").write_text("# rules\n", encoding="utf-8")
    (root / "LICENSE").write_text("Apache-2.0\n", encoding="utf-8")
    (root / "CITATION.cff").write_text("cff-version: 1.2.0\n", encoding="utf-8")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "start")
    return root


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    config = small_config()
    flow = finish(folder, config, root=repository)
    made = Finished(folder, repository, flow, config, folder / "tiny.zip", {})
    index = made.build(made.archive)
    return Finished(folder, repository, flow, config, made.archive, index)
