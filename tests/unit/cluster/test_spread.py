# SPDX-License-Identifier: Apache-2.0
"""Layouts over two nodes: their plans as a person reviewed them, and what can't be spread.

    python tests/unit/cluster/test_spread.py

writes the plans anew after a change that is meant; the difference is then for review.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from splitbench.cluster.script import gpus_of
from splitbench.errors import UserError
from splitbench.serving.plan import Plan, filled
from splitbench.serving.plan_script import script
from splitbench.workflow import Workflow

GOLDEN = Path(__file__).parents[2] / "golden" / "plans" / "two-nodes"
NETWORK = {"UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1", "UCX_TLS": "rc,cuda_copy,cuda_ipc,gdr_copy,tcp"}
CONFIG: dict[str, Any] = {
    "experiment": "two-nodes",
    "stack": {"name": "stub", "python": "bin/python", "packages": {"vllm": "1"}},
    "model": {"name": "m", "hub": "some/model"},
    "layouts": {
        "agg": {"kind": "replicas", "replicas": [{"gpus": [0, 1]}, {"gpus": [0, 1], "node": 1}]},
        "pd-nixl": {
            "kind": "pd",
            "connector": "nixl",
            "prefill": {"gpus": [0, 1]},
            "decode": {"gpus": [0, 1], "node": 1},
            "env": NETWORK,
        },
        "pd-lmcache": {
            "kind": "pd",
            "connector": "lmcache",
            "prefill": {"gpus": [0, 1], "node": 1},
            "decode": {"gpus": [0, 1]},
            "env": NETWORK,
        },
        "one-node": {"kind": "aggregated", "gpus": [0, 1, 2, 3]},
    },
    "workloads": {"long": {"input_tokens": 100, "output_tokens": 8}},
    "matrix": {"concurrency": [1]},
}
SPREAD = ("agg", "pd-nixl", "pd-lmcache")
FLOW = Workflow(CONFIG, sources=False)
PLACES = {"serving_python": "./p", "workflow_python": "./w", "model": "some/model"}


def plan_of(layout: str) -> Plan:
    return FLOW.cells.plans[layout]


def text_of(layout: str) -> str:
    return json.dumps(json.loads(FLOW.plan_text(layout)), sort_keys=True, indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("layout", SPREAD)
def test_plans_are_the_reviewed_ones(layout: str) -> None:
    assert text_of(layout) == (GOLDEN / f"{layout}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("layout", SPREAD)
def test_the_script_is_one_that_a_shell_reads_and_asks_for_addresses(layout: str) -> None:
    text = script(FLOW.experiment, plan_of(layout), PLACES)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "{node" not in "".join(line for line in text.splitlines() if not line.startswith("#"))
    assert 'NODE1="${NODE1:?' in text


@pytest.mark.parametrize("layout", SPREAD)
def test_every_engine_listens_where_the_others_look_for_it(layout: str) -> None:
    plan = plan_of(layout)
    whole = filled(
        plan, {**PLACES, "repository": "r", "session": "s", "node0": "10.0.0.1", "node1": "10.0.0.2"}
    )
    for engine in whole["engines"]:
        address = ("10.0.0.1", "10.0.0.2")[engine.get("node", 0)]
        assert engine["host"] == address == engine["argv"][engine["argv"].index("--host") + 1]
        elsewhere = "splitbench.cluster.remote" in engine["argv"]
        assert elsewhere == bool(engine.get("node", 0))
        assert engine["env"].get("VLLM_NIXL_SIDE_CHANNEL_HOST", address) == address
        assert address in " ".join(whole["proxy"]["argv"])
    assert plan.front_host == "127.0.0.1"
    assert plan.budget.count == 4 and plan.nodes == 2


def test_a_layout_on_one_node_is_what_it_was() -> None:
    plan = plan_of("one-node")
    assert plan.nodes == 1
    assert plan.engines[0].host == "127.0.0.1"
    moved = plan.model_copy(update={"engines": (plan.engines[0].model_copy(update={"node": 1}),)})
    assert moved.digest != plan.digest
    assert gpus_of(FLOW.experiment) == 4


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"connector": "lmcache-mp"}, "one node only"),
        ({"router": "vllm-router"}, "one node only"),
        ({"decode": {"gpus": [0, 1], "node": 0}}, "GPU 0 is used by two engines"),
        ({"decode": {"gpus": [0, 1], "node": 8}}, "node"),
    ],
)
def test_what_cannot_be_spread_is_refused(change: dict[str, Any], wrong: str) -> None:
    layout = CONFIG["layouts"]["pd-nixl"] | change
    with pytest.raises(UserError, match=wrong):
        Workflow(CONFIG | {"layouts": {"pd": layout}}, sources=False)


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in SPREAD:
        (GOLDEN / f"{name}.json").write_text(text_of(name), encoding="utf-8")
