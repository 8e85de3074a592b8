# SPDX-License-Identifier: Apache-2.0
"""The reference experiment's plans, as a person reviewed them; no GPU is needed to make them.

    python tests/unit/serving/test_golden_plans.py

writes them anew after a change that is meant; the difference is then for review.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from splitbench.serving import meanings
from splitbench.serving.plan import Plan
from splitbench.serving.plan_script import UnexplainedError, quoted, script
from splitbench.workflow import Workflow

REPOSITORY = Path(__file__).parents[3]
CONFIG = REPOSITORY / "config" / "experiments" / "sakura-h100.yaml"
GOLDEN = REPOSITORY / "tests" / "golden" / "plans" / "sakura-h100"
LAYOUTS = ("agg-tp4", "agg-tp8", "2x-agg-tp4", "pd-tp2", "pd-tp4", "2p1d")
# Not the workflow's own: an environment's folder carries the digest of its lock, which changes with every new version.
PLACES = {
    "serving_python": "./.splitbench/envs/cuda/bin/python",
    "workflow_python": "./.venv/bin/python",
    "model": "openai/gpt-oss-120b",
}
FLOW = Workflow(yaml.safe_load(CONFIG.read_text(encoding="utf-8")), [CONFIG])


def rendered(layout: str) -> tuple[str, str]:
    """Plan and script of a layout, as files hold them."""
    plan = json.dumps(json.loads(FLOW.plan_text(layout)), sort_keys=True, indent=2, ensure_ascii=False)
    return plan + "\n", script(FLOW.experiment, plan_of(layout), PLACES)


def plan_of(layout: str) -> Plan:
    return FLOW.cells.plans[layout]


def lists(text: str) -> list[list[str]]:
    """The words of each array of a script, comments left out, as bash reads them."""
    arrays = re.findall(r"^\w+=\(\n(.*?)^\)$", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(array, comments=True) for array in arrays]


def test_the_experiment_has_the_layouts_of_its_question() -> None:
    assert set(FLOW.experiment.layouts) == set(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_are_the_reviewed_ones(layout: str) -> None:
    plan, text = rendered(layout)
    assert plan == (GOLDEN / f"{layout}.json").read_text(encoding="utf-8")
    assert text == (GOLDEN / f"{layout}.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_script_is_the_plan_and_every_line_of_it_is_explained(layout: str) -> None:
    text = rendered(layout)[1]
    plan = plan_of(layout)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    parts = [*plan.services, *plan.engines, *([plan.proxy] if plan.proxy else [])]
    for words, part in zip(lists(text), parts, strict=True):
        assert words[0] == "env"
        shown = [
            re.sub(r"\$([A-Z_]+)", lambda match: "{" + match[1].lower() + "}", word) for word in words[1:]
        ]
        count = len(part.env)
        assert dict(word.split("=", 1) for word in shown[:count]) == part.env
        assert tuple(shown[count:]) == part.argv
    previous = ""
    for line in text.splitlines():
        if re.match(r"  (--|[A-Z_]+=)", line):
            assert previous.strip().startswith("# ") and len(previous.strip()) > 10, line
        previous = line


def test_the_workflows_script_names_the_environment_and_the_model() -> None:
    text = FLOW.plan_script("pd-tp2")
    assert f"/{FLOW.stack_key}/bin/python}}" in text or str(FLOW.experiment.stack.python) in text
    assert 'MODEL="${MODEL:-openai/gpt-oss-120b}"' in text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_added_to_the_model(layout: str) -> None:
    for engine in plan_of(layout).engines:
        assert FLOW.experiment.model.hub == "openai/gpt-oss-120b"
        assert not [word for word in engine.argv if "quantization" in word or "max-model-len" in word]
    for text in plan_of(layout).files.values():
        assert yaml.safe_load(text)["pd_buffer_device"] == "cuda"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ports_are_distinct_and_every_decoder_rank_has_its_pair(layout: str) -> None:
    plan = plan_of(layout)
    assert len(set(plan.ports)) == len(plan.ports)
    receivers = {
        e.name: yaml.safe_load(plan.files[f"{e.name}.lmcache.yaml"])
        for e in plan.engines
        if e.role == "decode"
    }
    flat: dict[str, list[int]] = {"init": [], "alloc": []}
    for engine in plan.engines:
        if engine.role == "decode":
            for kind, numbers in flat.items():
                found = receivers[engine.name][f"pd_peer_{kind}_port"]
                assert len(found) == len(engine.devices)
                numbers += found
            assert set(engine.other_ports) == set(flat["init"][-len(engine.devices) :]) | set(
                flat["alloc"][-len(engine.devices) :]
            )
    if plan.kind == "pd":
        assert plan.proxy is not None
        for kind, numbers in flat.items():
            given = plan.proxy.argv[plan.proxy.argv.index(f"--decoder-{kind}-port") + 1]
            assert given == ",".join(map(str, numbers))


@pytest.mark.parametrize(
    ("table", "name", "layout"),
    [
        ("ENGINE_FLAGS", "tensor-parallel-size", "agg-tp4"),
        ("PROXY_FLAGS", "decoder-alloc-port", "pd-tp2"),
        ("ENVIRONMENT", "PYTHONHASHSEED", "pd-tp2"),
        ("KV_TRANSFER", "lmcache_rpc_port", "pd-tp2"),
        ("LMCACHE_FILE", "pd_buffer_size", "pd-tp2"),
    ],
)
def test_a_flag_without_an_explanation_is_an_error(
    table: str, name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = {key: text for key, text in getattr(meanings, table).items() if key != name}
    monkeypatch.setattr(meanings, table, without)
    with pytest.raises(UnexplainedError, match=name):
        script(FLOW.experiment, plan_of(layout), PLACES)


@pytest.mark.parametrize(
    "text", ["", "a b", "it's", '{"a": "{x}"}', "$HOME", "{session}/a b", "x{model}y{model}"]
)
def test_words_reach_the_program_as_they_are(text: str) -> None:
    shown = subprocess.run(
        ["bash", "-c", f"printf %s {quoted(text)}"],
        env={"SESSION": "/s e", "MODEL": "m*"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown == text.replace("{session}", "/s e").replace("{model}", "m*")


def write_golden() -> None:
    """Write the files that the tests compare with."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for layout in LAYOUTS:
        for end, text in zip(("json", "sh"), rendered(layout), strict=True):
            (GOLDEN / f"{layout}.{end}").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_golden()
