# SPDX-License-Identifier: Apache-2.0
"""Scripts of every kind of layout: all is explained, and what a config sets is marked as that."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitbench.experiment.load import load_experiment, read_yaml
from splitbench.serving.plan_script import script
from splitbench.serving.render import render
from splitbench.workflow import Workflow
from tests.fakes.experiments import GOOD

REPOSITORY = Path(__file__).parents[3]
PLACES = {"serving_python": "./python", "workflow_python": "./python", "model": "./model"}
EXPERIMENTS = [
    REPOSITORY / "config" / "config.yaml",
    *sorted((REPOSITORY / "config" / "experiments").glob("*.yaml")),
]
ONE_GPU = {"gpus": [0], "memory_share": 0.4}
LAYOUTS: dict[str, Any] = {
    "nixl": {"kind": "pd", "connector": "nixl", "prefill": {"gpus": [0, 1]}, "decode": {"gpus": [2, 3]}},
    "nixl on cores": {"kind": "pd", "connector": "nixl", "prefill": {"cores": [0]}, "decode": {"cores": [1]}},
    "lmcache-mp": {
        "kind": "pd",
        "connector": "lmcache-mp",
        "prefill": {"cores": [0]},
        "decode": {"cores": [1]},
    },
    "mps": {
        "kind": "pd",
        "connector": "lmcache",
        "trace": True,
        "prefill": ONE_GPU | {"share": {"mps_percent": 60}},
        "decode": ONE_GPU | {"share": {"mps_percent": 40}},
    },
    "everything": {
        "kind": "aggregated",
        "gpus": [0, 1, 2, 3, 4, 5, 6, 7],
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "kv_cache_bytes": 10**9,
        "args": {"some-new-flag": "x y", "max-num-seqs": 8},
        "env": {"SOME_NEW_VARIABLE": "it's"},
    },
    "router": {
        "kind": "pd",
        "connector": "nixl",
        "router": "vllm-router",
        "prefill": {"gpus": [0]},
        "decode": {"gpus": [1]},
    },
    "routed replicas": {
        "kind": "replicas",
        "router": "vllm-router",
        "replicas": [{"gpus": [0]}, {"gpus": [1]}],
    },
}


def script_of(layout: dict[str, Any]) -> str:
    experiment = load_experiment(copy.deepcopy(GOOD) | {"layouts": {"it": layout}})
    return script(experiment, render(experiment, "it"), PLACES)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kind_of_layout_is_explained(name: str) -> None:
    text = script_of(LAYOUTS[name])
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_demo_is_explained() -> None:
    file = REPOSITORY / "config" / "config.yaml"
    flow = Workflow(yaml.safe_load(file.read_text(encoding="utf-8")), [file])
    for layout in flow.experiment.layouts:
        assert "taskset -c" in flow.plan_script(layout)


def test_what_the_config_sets_says_so() -> None:
    lines = script_of(LAYOUTS["everything"]).splitlines()
    before = {line.strip(): lines[index - 1].strip() for index, line in enumerate(lines)}
    assert before["--some-new-flag 'x y'"] == "# from the config"
    assert before["--max-num-seqs 8"] == "# requests in one step at most (from the config)"
    assert before["""SOME_NEW_VARIABLE='it'"'"'s'"""] == "# from the config"
    assert before["--kv-cache-memory-bytes 1000000000"].startswith("# size of the KV pool")


def test_services_start_before_the_engines() -> None:
    text = script_of(LAYOUTS["lmcache-mp"])
    assert text.index("start lmcache ") < text.index("/healthcheck") < text.index("start prefill-0 ")
    text = script_of(LAYOUTS["mps"])
    assert text.index("healthy http://127.0.0.1:17102/health") < text.index("start decode-0 ")
    assert (
        text.index("start mps ")
        < text.index('until [ -e "$RUNTIME"/control ]')
        < text.index("start prefill-0 ")
    )


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_every_layout_of_every_experiment_has_a_script(file: Path) -> None:
    """Options that only the config knows are said to be from the config."""
    flow = Workflow(read_yaml(file), [file])
    for layout in flow.experiment.layouts:
        assert flow.plan_script(layout).startswith("#!/usr/bin/env bash")
