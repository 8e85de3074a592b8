# SPDX-License-Identifier: Apache-2.0
"""What layouts' plans start as their front door, and that it understands what it is told."""

from __future__ import annotations

from typing import Any

import pytest

from splitbench.errors import UserError
from splitbench.experiment.load import load_experiment
from splitbench.proxy.options import parse_options
from splitbench.serving.plan import Plan
from splitbench.serving.render import render

PD = {"kind": "pd", "prefill": [{"gpus": [0]}, {"gpus": [1]}]}
LAYOUTS: dict[str, Any] = {
    "nixl": PD | {"connector": "nixl", "decode": {"gpus": [2, 3], "tp": 2}},
    "lmcache": PD
    | {"connector": "lmcache", "decode": [{"gpus": [2, 3], "tp": 2}, {"gpus": [4, 5], "tp": 2}]},
    "lmcache-late": PD | {"connector": "lmcache", "decode": {"gpus": [2]}, "first_token": "decoder"},
    "replicas": {"kind": "replicas", "replicas": [{"gpus": [0]}, {"gpus": [1]}, {"gpus": [2]}]},
}


def plan(layout: dict[str, Any]) -> Plan:
    config = {
        "experiment": "front-doors",
        "title": "Front doors",
        "stack": {"name": "any", "python": "bin/python", "packages": {"vllm": "0.32.0"}},
        "model": {"name": "m", "synthetic": {}},
        "layouts": {"it": layout, "other": {"kind": "aggregated", "gpus": [6]}},
        "workloads": {"w": {"input_tokens": 8, "output_tokens": 8}},
        "matrix": {"concurrency": [1]},
    }
    return render(load_experiment(config), "it")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_proxy_understands_the_plans_command_line(name: str) -> None:
    made = plan(LAYOUTS[name])
    assert made.proxy is not None
    assert made.proxy.argv[1:3] == ("-m", "splitbench.proxy")
    options = parse_options(made.proxy.argv[3:])
    assert (options.host, options.port) == (made.proxy.host, made.proxy.port)
    for role, addresses in (("prefill", options.prefillers), ("decode", options.decoders)):
        engines = [engine for engine in made.engines if engine.role in (role, "aggregated")]
        if name == "replicas" and role == "prefill":
            engines = []
        assert [(a.host, a.port) for a in addresses] == [(e.host, e.port) for e in engines]
        if name.startswith("lmcache"):
            assert [(*a.init_ports, *a.alloc_ports) for a in addresses] == [e.other_ports for e in engines]
    if name.startswith("lmcache"):
        assert made.proxy.other_ports == (options.notify_port,)
        assert options.first_token == ("decoder" if name == "lmcache-late" else "prefiller")


@pytest.mark.parametrize("name", ["nixl", "replicas"])
def test_vllm_router_can_take_its_place(name: str) -> None:
    builtin, router = plan(LAYOUTS[name]), plan(LAYOUTS[name] | {"router": "vllm-router"})
    assert router.proxy is not None
    assert router.proxy.argv[1:3] == ("-m", "vllm_router.launch_router")
    assert router.engines == builtin.engines
    assert router.digest != builtin.digest
    text = " ".join(router.proxy.argv)
    for engine in router.engines:
        flag = "" if name == "replicas" else f"--{engine.role} "
        assert f"{flag}http://{engine.host}:{engine.port}" in text
    ports = [router.proxy.port, *router.proxy.other_ports]
    ports += [port for engine in router.engines for port in (engine.port, *engine.other_ports)]
    assert len(set(ports)) == len(ports)


def test_vllm_router_serves_no_lmcache() -> None:
    with pytest.raises(UserError, match="vllm-router"):
        plan(LAYOUTS["lmcache"] | {"router": "vllm-router"})
