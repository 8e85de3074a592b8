# SPDX-License-Identifier: Apache-2.0
"""Plans: every port once, flags from three levels, what each protocol wants on its two sides."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml

from splitbench.errors import UserError
from splitbench.experiment.load import load_experiment
from splitbench.proxy.options import parse_options
from splitbench.serving.plan import EnginePlan, Plan, fill
from splitbench.serving.render import plan_digest, render
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


def test_lmcache_mp_is_a_server_that_both_sides_use() -> None:
    layout = {"kind": "pd", "connector": "lmcache-mp", "prefill": {"cores": [0]}, "decode": {"cores": [1]}}
    found = plan(layout | {"kv_buffer_gb": 1.5})
    (server,) = found.services
    assert server.name == "lmcache"
    assert server.argv[server.argv.index("--l1-size-gb") + 1] == "1.5"
    assert server.argv[server.argv.index("--chunk-size") + 1] == "128"
    assert server.argv[server.argv.index("--supported-transfer-mode") + 1] == "auto"
    port = server.argv[server.argv.index("--port") + 1]
    for engine in found.engines:
        config = transfer(engine)
        assert (config["kv_connector"], config["kv_role"]) == ("LMCacheMPConnector", "kv_both")
        assert config["kv_connector_extra_config"]["lmcache.mp.port"] == int(port)
    assert server.health_port in server.ports
    assert len(set(found.ports)) == len(found.ports) == 3 + 2 + 1
    assert found.proxy is not None
    assert parse_options(found.proxy.argv[3:]).mode == "lmcache-mp"
    on_gpus = layout | {"prefill": {"gpus": [0]}, "decode": {"gpus": [1]}}
    assert "256" in plan(on_gpus).services[0].argv
    assert "64" in plan(on_gpus | {"kv_chunk_tokens": 64}).services[0].argv


def test_engines_of_a_shared_gpu_count_within_the_mps_daemon() -> None:
    half = {"share": {"mps_percent": 50}, "memory_share": 0.4}
    layout = {
        "kind": "pd",
        "connector": "nixl",
        "prefill": [{"gpus": [2]} | half, {"gpus": [3]} | half],
        "decode": [{"gpus": [3]} | half, {"gpus": [2]} | half],
    }
    found = plan(layout)
    (daemon,) = found.services
    assert daemon.argv == ("nvidia-cuda-mps-control", "-f")
    assert daemon.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert [engine.env["CUDA_VISIBLE_DEVICES"] for engine in found.engines] == ["0", "1", "1", "0"]
    for engine in found.engines:
        assert engine.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        assert engine.env["CUDA_MPS_PIPE_DIRECTORY"] == daemon.env["CUDA_MPS_PIPE_DIRECTORY"]
    assert (str(found.budget), found.budget.share) == ("2 GPUs", "mps 50+50+50+50")


def test_time_slicing_needs_no_daemon_and_is_named() -> None:
    engine = {"gpus": [0], "share": "time-sliced", "kv_cache_bytes": 10**9}
    found = plan({"kind": "pd", "connector": "nixl", "prefill": engine, "decode": engine})
    assert found.services == ()
    assert (str(found.budget), found.budget.share) == ("1 GPU", "time-sliced")
    assert all(value(each, "--kv-cache-memory-bytes") == str(10**9) for each in found.engines)
    alone = plan({"kind": "pd", "connector": "nixl", "prefill": {"gpus": [0]}, "decode": {"gpus": [1]}})
    assert alone.budget.share is None


def test_an_engines_memory_goes_before_the_experiments_flag() -> None:
    sections = {"engine": {"args": {"gpu-memory-utilization": 0.9}}}
    (engine,) = plan({"kind": "aggregated", "gpus": [0], "memory_share": 0.5}, **sections).engines
    assert engine.argv.count("--gpu-memory-utilization") == 1
    assert value(engine, "--gpu-memory-utilization") == "0.5"


def test_parallel_sizes_become_flags_and_nixl_gets_adjacent_ports() -> None:
    engine = {"gpus": [0, 1, 2, 3], "tp": 1, "pp": 2, "dp": 2, "port": 17103}
    layout = {"kind": "pd", "connector": "nixl", "prefill": engine, "decode": {"gpus": [4, 5], "dp": 2}}
    prefill, decode = plan(layout).engines
    assert value(prefill, "--pipeline-parallel-size") == value(prefill, "--data-parallel-size") == "2"
    assert "--tensor-parallel-size" not in prefill.argv
    assert value(decode, "--data-parallel-size") == "2"
    assert "--tensor-parallel-size" not in decode.argv
    first = int(prefill.env["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    # The fixed port 17103 lies where they would have been counted.
    assert prefill.other_ports == tuple(range(first, first + 4)) == (17104, 17105, 17106, 17107)


@pytest.mark.parametrize("kind", ["pd", "replicas"])
def test_a_trace_is_written_into_the_sessions_folder_and_only_when_asked(kind: str) -> None:
    layout: dict[str, Any] = {"kind": "replicas", "replicas": [{"gpus": [0]}, {"gpus": [1]}]}
    if kind == "pd":
        layout = {"kind": "pd", "connector": "nixl", "prefill": {"gpus": [0]}, "decode": {"gpus": [1]}}
    off, on = plan(layout), plan(layout | {"trace": True})
    assert off.proxy is not None and on.proxy is not None
    assert "--trace-file" not in off.proxy.argv
    assert on.proxy.argv == (*off.proxy.argv, "--trace-file", "{session}/proxy-trace.jsonl")
    assert on.digest != off.digest
    assert parse_options(on.proxy.argv[3:]).trace_file is not None


def test_what_came_later_leaves_the_digest_of_plans_without_it() -> None:
    # Results that are there stay valid; these are the digests from before services and shares.
    known = {
        "agg": "a6dda43c006b9ccde5030f0ad139f71f46e1a89b3e278c94182eae2c63a1931d",
        "pd": "413ac7d0a43d101f37ca191ce49e660cd604afb439d12fc2e665b6048bbf049f",
        "two": "cba3d3a02330cc0641e3f699621b6fdc5523505c2b430c4f1e086b4800518402",
        "tp": "f9ceb4f45798979bfa822169943109da487f599bc60f216bbb1c4a4b68666c55",
    }
    experiment = load_experiment(GOOD)
    assert {name: plan_digest(experiment, name) for name in known} == known


def test_only_known_placeholders_are_filled() -> None:
    assert fill('{model} {"a": {x}} {model}', {"model": "m"}) == 'm {"a": {x}} m'


TIMES = {"gpus": [0], "share": "time-sliced", "memory_share": 0.4}


def test_further_options_reach_the_connector_and_lmcache() -> None:
    found = plan(
        {
            "kind": "pd",
            "connector": "lmcache",
            "connector_options": {"skip_last_n_tokens": 0},
            "lmcache_options": {"pd_backend_mode": "sync"},
            "prefill": TIMES,
            "decode": TIMES,
        }
    )
    for engine in found.engines:
        extra = transfer(engine)["kv_connector_extra_config"]
        assert extra["skip_last_n_tokens"] == 0
        assert extra["lmcache_rpc_port"] == engine.name
        assert yaml.safe_load(found.files[f"{engine.name}.lmcache.yaml"])["pd_backend_mode"] == "sync"
        assert "kv_connector_module_path" not in transfer(engine)
    nixl = {"kind": "pd", "connector": "nixl", "prefill": TIMES, "decode": TIMES}
    extra = transfer(plan(nixl | {"connector_options": {"num_threads": 1}}).engines[0])
    assert extra["kv_connector_extra_config"] == {"num_threads": 1}
    assert "kv_connector_extra_config" not in transfer(plan(nixl).engines[0])
    with pytest.raises(UserError, match="has no 'lmcache_options'"):
        plan(nixl | {"lmcache_options": {"chunk_size": 1}})


def test_a_mended_lmcache_is_the_engines_own_connector() -> None:
    layout = {
        "kind": "pd",
        "connector": "lmcache",
        "prefill": TIMES,
        "decode": TIMES,
        "lmcache_repairs": ["waited-saves"],
    }
    prefill, decode = plan(layout).engines
    assert transfer(prefill)["kv_connector_module_path"] == "splitbench.serving.repaired_lmcache"
    assert transfer(prefill)["kv_connector"] == "LMCacheConnectorV1"
    assert prefill.env["PYTHONPATH"] == "{repository}"
    # Only who saves can wait for it; rows are moved by both.
    assert "kv_connector_module_path" not in transfer(decode)
    for engine in plan(layout | {"lmcache_repairs": ["packed-kv", "waited-saves"]}).engines:
        assert "packed-kv" in transfer(engine)["kv_connector_extra_config"]["splitbench.repairs"]
    with pytest.raises(UserError, match="'lmcache_repairs'"):
        plan(layout | {"connector": "nixl"})
