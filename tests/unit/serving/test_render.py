# SPDX-License-Identifier: Apache-2.0
"""Plans: every port once, flags from three levels, what each protocol wants on its two sides."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml

from splitbench.experiment.load import load_experiment
from splitbench.serving.plan import EnginePlan, Plan, fill
from splitbench.serving.render import render
from tests.fakes.experiments import GOOD


def plan(layout: dict[str, Any], **sections: Any) -> Plan:
    config = copy.deepcopy(GOOD) | sections
    config["layouts"] = {"it": layout}
    return render(load_experiment(config), "it")


def value(engine: EnginePlan, flag: str) -> str:
    return engine.argv[engine.argv.index(flag) + 1]


def transfer(engine: EnginePlan) -> dict[str, Any]:
    return dict(json.loads(value(engine, "--kv-transfer-config")))


def test_aggregated_on_gpus_is_one_engine_over_all_of_them() -> None:
    found = plan({"kind": "aggregated", "gpus": [4, 5, 6, 7], "memory_share": 0.8})
    (engine,) = found.engines
    assert value(engine, "--tensor-parallel-size") == "4"
    assert value(engine, "--gpu-memory-utilization") == "0.8"
    assert engine.env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert found.proxy is None
    assert str(found.budget) == "4 GPUs"
    assert found.front_port == engine.port


def test_engines_on_cores_are_bound_to_them() -> None:
    (engine,) = plan({"kind": "aggregated", "cores": [0, 1]}).engines
    assert engine.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert engine.env["GOMP_CPU_AFFINITY"] == "0,1"
    assert engine.env["OMP_NUM_THREADS"] == "2"
    assert "--tensor-parallel-size" not in engine.argv


def test_flags_and_environment_of_the_nearest_level_win_and_null_removes() -> None:
    layout = {
        "kind": "pd",
        "connector": "nixl",
        "args": {"max-num-seqs": 2, "seed": 3, "enforce-eager": False},
        "env": {"A": "layout", "B": "layout"},
        "prefill": {"cores": [0], "args": {"seed": None}, "env": {"B": "engine"}},
        "decode": {"cores": [1]},
    }
    sections = {"engine": {"args": {"max-num-seqs": 1, "max-model-len": 99}, "env": {"A": "experiment"}}}
    prefill, decode = plan(layout, **sections).engines
    assert value(prefill, "--max-num-seqs") == value(decode, "--max-num-seqs") == "2"
    assert value(prefill, "--max-model-len") == "99"
    assert "--seed" not in prefill.argv
    assert value(decode, "--seed") == "3"
    assert "--no-enforce-eager" in decode.argv
    assert (prefill.env["A"], prefill.env["B"], decode.env["B"]) == ("layout", "engine", "layout")


def test_nixl_engines_have_side_channels_and_roles_of_their_own() -> None:
    found = plan({"kind": "pd", "connector": "nixl", "prefill": {"cores": [0]}, "decode": {"cores": [1]}})
    prefill, decode = found.engines
    assert [transfer(engine)["kv_role"] for engine in found.engines] == ["kv_producer", "kv_consumer"]
    assert transfer(decode)["kv_buffer_device"] == "cpu"
    sides = {engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for engine in found.engines}
    assert len(sides) == 2
    assert found.first_token == "decoder"
    assert found.proxy is not None
    assert found.proxy.argv[found.proxy.argv.index("--prefiller-port") + 1] == str(prefill.port)


def test_lmcache_has_a_port_of_each_kind_per_decoder_rank_and_files_that_agree() -> None:
    found = plan(
        {
            "kind": "pd",
            "connector": "lmcache",
            "prefill": {"gpus": [0, 1]},
            "decode": [{"gpus": [2, 3]}, {"gpus": [4, 5]}],
        }
    )
    sender = yaml.safe_load(found.files["prefill-0.lmcache.yaml"])
    receivers = [yaml.safe_load(found.files[f"decode-{index}.lmcache.yaml"]) for index in (0, 1)]
    assert sender["pd_role"] == "sender"
    assert found.proxy is not None
    assert found.proxy.other_ports == (sender["pd_proxy_port"],)
    for receiver in receivers:
        assert len(receiver["pd_peer_init_port"]) == len(receiver["pd_peer_alloc_port"]) == 2
        assert receiver["pd_buffer_device"] == "cuda"
    assert found.first_token == "prefiller"
    assert all(engine.env["PYTHONHASHSEED"] == "0" for engine in found.engines)
    assert [transfer(engine)["kv_role"] for engine in found.engines] == ["kv_producer"] + ["kv_consumer"] * 2
    assert found.budget.count == 6


@pytest.mark.parametrize(
    "layout",
    [
        {"kind": "replicas", "replicas": [{"gpus": [0, 1]}, {"gpus": [2, 3]}]},
        {"kind": "pd", "connector": "nixl", "prefill": {"gpus": [0, 1]}, "decode": {"gpus": [2, 3]}},
        {
            "kind": "pd",
            "connector": "lmcache",
            "prefill": [{"gpus": [0]}, {"gpus": [1]}],
            "decode": [{"gpus": [2], "port": 17101}, {"gpus": [3]}],
        },
    ],
)
def test_no_port_is_given_twice(layout: dict[str, Any]) -> None:
    ports = plan(layout).ports
    assert len(ports) == len(set(ports))


def test_only_known_placeholders_are_filled() -> None:
    assert fill('{model} {"a": {x}} {model}', {"model": "m"}) == 'm {"a": {x}} m'
