# SPDX-License-Identifier: Apache-2.0
"""The conda-style environments: no channel can be reached here, so what conda would be told is what is tested."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ENVS = Path(__file__).parents[3] / "envs"


def _pip(name: str) -> list[str]:
    text = yaml.safe_load((ENVS / name).read_text(encoding="utf-8"))
    assert set(text) == {"channels", "dependencies"} and "pip" in text["dependencies"]
    (listed,) = (part["pip"] for part in text["dependencies"] if isinstance(part, dict))
    return [str(line) for line in listed]


def test_the_workflow_s_file_holds_its_lock_itself() -> None:
    # Snakemake hands conda a copy of the file from another folder: nothing beside it is found there.
    first, *lines = _pip("workflow.yaml")
    assert first == "--require-hashes" and not any(line.startswith("-") for line in lines)
    text = (ENVS / "workflow.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    locked = [
        " ".join(line.split())
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    assert [" ".join(line.split()) for line in lines] == locked and len(locked) > 50
    assert all("--hash=sha256:" in line for line in lines)


def test_every_rule_s_environment_is_that_file() -> None:
    rules = (ENVS.parent / "rules").glob("*.smk")
    named = {name for path in rules for name in re.findall(r'"\.\./envs/([\w.-]+)"', path.read_text("utf-8"))}
    assert named == {"workflow.yaml"}


def test_the_serving_file_names_a_lock_beside_it() -> None:
    hashes, lock = _pip("serving.yaml")
    assert hashes == "--require-hashes" and (ENVS / lock.removeprefix("-r ")).is_file()
