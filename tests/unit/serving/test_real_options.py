# SPDX-License-Identifier: Apache-2.0
"""What engines and the client are told, against the options of the real versions' parsers (tests/fixtures/vllm)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitbench.measuring.command import bench_command
from splitbench.workflow import Workflow

REPOSITORY = Path(__file__).parents[3]
KEPT = REPOSITORY / "tests" / "fixtures" / "vllm"
CONFIGS = REPOSITORY / "config"
# Experiments by the stack whose parsers were read.
CASES = [
    ("experiments/sakura-h100.yaml", "options-0.11.0.json"),
    ("experiments/gpus4-replicas-pd.yaml", "options-0.32.0.json"),
    ("config.yaml", "options-0.32.0-cpu.json"),
    ("experiments/cores-chat.yaml", "options-0.32.0-cpu.json"),
    ("experiments/cores-replicas.yaml", "options-0.32.0-cpu.json"),
    ("experiments/cpu-lmcache-mp.yaml", "options-0.32.0-cpu.json"),
]


def complaints(argv: Sequence[str], options: Mapping[str, Any]) -> Iterator[str]:
    """What a parser with these options would not take: an option that it lacks, a value too many, few or wrong."""
    at = 0
    while at < len(argv):
        option, at = argv[at], at + 1
        if option not in options:
            yield f"{option} is unknown"
            continue
        rule = options[option] if isinstance(options[option], list) else [options[option]]
        values = []
        while at < len(argv) and not argv[at].startswith("--"):
            values.append(argv[at])
            at += 1
        takes, choices = rule[0], rule[1:]
        fits = {"+": len(values) >= 1, "*": True, "?": len(values) <= 1}.get(takes, len(values) == takes)
        if not fits:
            yield f"{option} takes {takes}, given {len(values)}"
        for value in values:
            if choices and value not in choices:
                yield f"{option} does not take {value}"


@pytest.mark.parametrize(("config", "kept"), CASES)
def test_the_real_parsers_take_what_is_rendered(config: str, kept: str) -> None:
    options = json.loads((KEPT / kept).read_text(encoding="utf-8"))
    path = CONFIGS / config
    flow = Workflow(yaml.safe_load(path.read_text(encoding="utf-8")), [path], REPOSITORY)
    found = []
    for plan in flow.cells.plans.values():
        for engine in plan.engines:
            assert engine.argv[3] == "serve"
            found += complaints(engine.argv[5:], options["serve"])  # after the model, which is positional
    for cell in flow.cells.all:
        for result in (None, Path("/tmp/bench.json")):
            argv = bench_command(
                cell, base_url="http://x", tokenizer="t", prompts=3, seed=1, result=result, dataset=Path("d")
            )
            assert argv[:2] == ["bench", "serve"]
            found += complaints(argv[2:], options["bench serve"])
    assert sorted(set(found)) == []


def test_lmcache_knows_every_key_of_the_reference_s_files() -> None:
    known = json.loads((KEPT / "options-0.11.0.json").read_text(encoding="utf-8"))["lmcache file keys"]
    path = CONFIGS / "experiments/sakura-h100.yaml"
    flow = Workflow(yaml.safe_load(path.read_text(encoding="utf-8")), [path], REPOSITORY)
    files = [text for plan in flow.cells.plans.values() for text in plan.files.values()]
    assert len(files) >= 7
    assert {key for text in files for key in yaml.safe_load(text)} <= set(known)


def test_complaints_are_seen() -> None:
    options = {"--a": 0, "--b": 1, "--c": "+", "--d": [1, "x", "y"]}
    assert not list(complaints(["--a", "--b", "1", "--c", "1", "2", "--d", "y"], options))
    wrong = ["--a", "1", "--b", "--c", "--d", "z", "--e"]
    assert list(complaints(wrong, options)) == [
        "--a takes 0, given 1",
        "--b takes 1, given 0",
        "--c takes +, given 0",
        "--d does not take z",
        "--e is unknown",
    ]
