# SPDX-License-Identifier: Apache-2.0
"""What a repository promises by its head lines, licence, version and issue forms."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

import splitbench
from tests.unit.docs.pages import REPOSITORY

HEAD = "SPDX-License-Identifier: Apache-2.0"
# Made by tools that write their own head, pictures, or data whose every byte matters.
WITHOUT = re.compile(
    r"\.(lock|json|parquet|png|md|rst|gz|whl|zip|patch|present)$|^LICENSE$|(^|/)\.gitignore$|^tests/(fixtures|golden)/"
)


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(name) for name in listed.stdout.split("\0") if name and (REPOSITORY / name).is_file()]


def test_every_source_file_says_its_licence_in_its_first_lines() -> None:
    sources = [path for path in tracked() if not WITHOUT.search(path.as_posix())]
    assert len(sources) > 150
    lacking = []
    for path in sources:
        first = (REPOSITORY / path).read_text(encoding="utf-8").split("\n")[:3]
        if not any(HEAD in line for line in first):
            lacking.append(path.as_posix())
    assert lacking == [], f"add '{HEAD}' to the first lines"


def test_no_file_holds_the_marks_of_a_conflict() -> None:
    marks = ("<" * 7 + " ", ">" * 7 + " ")
    for path in tracked():
        if path.suffix in (".py", ".smk", ".md", ".yaml", ".json", ".toml", ".html", ".j2", ".sh", ".in", ""):
            text = (REPOSITORY / path).read_text(encoding="utf-8", errors="replace")
            assert not any(line.startswith(marks) for line in text.splitlines()), path


def test_the_licence_is_there_in_full() -> None:
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_one_version_everywhere() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert project["version"] == splitbench.__version__ == citation["version"]
    assert project["license"] == citation["license"] == "Apache-2.0"
    assert splitbench.__version__ in (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")


def test_forms_and_hooks_are_what_their_readers_expect() -> None:
    for path in (REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form), path
        ids = [item["id"] for item in form["body"]]
        assert len(ids) == len(set(ids))
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    # A hook from elsewhere would be another version of the tool than `make check` runs.
    assert [repository["repo"] for repository in hooks] == ["local"]
    for hook in hooks[0]["hooks"]:
        assert hook["entry"].startswith(".venv/bin/")
    catalog = yaml.safe_load((REPOSITORY / ".snakemake-workflow-catalog.yml").read_text(encoding="utf-8"))
    assert set(catalog["usage"]) == {"mandatory-flags", "software-stack-deployment", "report"}


def test_every_experiment_names_the_schema_that_editors_check_it_with() -> None:
    for path in [REPOSITORY / "config/config.yaml", *(REPOSITORY / "config/experiments").glob("*.yaml")]:
        named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", path.read_text(encoding="utf-8"))
        assert named is not None, path
        assert (path.parent / named[1]).resolve() == (REPOSITORY / "config" / "schema.json").resolve(), path
