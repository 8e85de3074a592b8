# SPDX-License-Identifier: Apache-2.0
"""Launch plans of stubbed engines, and what else a session of them needs."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from splitbench.serving.plan import Budget, EnginePlan, Plan, ProxyPlan
from splitbench.serving.session import ClientPlan, Owner, Places, SessionRequest

STUB = Path(__file__).parent / "vllm_stub"
REPOSITORY = Path(__file__).parents[2]


_PORTS_EACH, _APART = 2700, 2750  # what counts on from a port still stays below the next process's


def free_ports(count: int) -> list[int]:
    """Ports that nobody holds now, from below the range that the kernel gives to outgoing connections."""
    found: list[int] = []
    # Each of the processes that tests run in has ports of its own, or two would take the same ones at once.
    first = 20000 + _APART * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4)
    candidate = first + hash((sys.argv[0], id(found), socket.gethostname())) % _PORTS_EACH
    while len(found) < count:
        candidate = first + (candidate - first + 1) % _PORTS_EACH
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", candidate))
            except OSError:
                continue
        found.append(candidate)
    return found


def engine(
    name: str,
    role: str,
    port: int,
    *,
    device: int = 0,
    side_port: int | None = None,
    behaviour: Mapping[str, str] | None = None,
    startup_limit_s: float = 20.0,
) -> EnginePlan:
    """A stubbed engine; `behaviour` holds VLLM_STUB_ settings without that prefix."""
    argv = ["{serving_python}", "-m", "vllm.entrypoints.cli.main", "serve", "{model}"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "stub"]
    env = {"PYTHONPATH": str(STUB)}
    env |= {f"VLLM_STUB_{key.upper()}": value for key, value in (behaviour or {}).items()}
    if side_port is not None:
        argv += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})]
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_port)
    return EnginePlan(
        name=name,
        role=role,  # type: ignore[arg-type]
        devices=(device,),
        port=port,
        other_ports=() if side_port is None else (side_port,),
        argv=tuple(argv),
        env=env,
        startup_limit_s=startup_limit_s,
    )


def aggregated(
    port: int, *, layout: str = "agg", grace_s: float = 2.0, startup_limit_s: float = 20.0, **behaviour: str
) -> Plan:
    """One engine."""
    return Plan(
        layout=layout,
        kind="aggregated",
        budget=Budget(kind="cores", count=1),
        served_model="stub",
        engines=(
            engine("engine0", "aggregated", port, behaviour=behaviour, startup_limit_s=startup_limit_s),
        ),
        shutdown_grace_s=grace_s,
    )


def disaggregated(
    ports: list[int],
    *,
    layout: str = "pd",
    grace_s: float = 2.0,
    prefill: Mapping[str, str] | None = None,
    decode: Mapping[str, str] | None = None,
    proxy_arguments: tuple[str, ...] = (),
) -> Plan:
    """A prefill and a decode engine behind the stub's proxy; five ports."""
    front, prefill_port, prefill_side, decode_port, decode_side = ports
    argv = ("{serving_python}", "-m", "vllm.stub_proxy", "--port", str(front))
    argv += ("--prefill", f"http://127.0.0.1:{prefill_port}", "--decode", f"http://127.0.0.1:{decode_port}")
    return Plan(
        layout=layout,
        kind="pd",
        connector="nixl",
        first_token="decoder",
        budget=Budget(kind="cores", count=2),
        served_model="stub",
        engines=(
            engine("prefill0", "prefill", prefill_port, side_port=prefill_side, behaviour=prefill),
            engine("decode0", "decode", decode_port, device=1, side_port=decode_side, behaviour=decode),
        ),
        proxy=ProxyPlan(port=front, argv=argv + proxy_arguments, env={"PYTHONPATH": str(STUB)}),
        shutdown_grace_s=grace_s,
    )


def warm_client() -> ClientPlan:
    """A client that only exists."""
    return ClientPlan(
        ("{serving_python}", "-m", "vllm.stub_client", "{client_socket}"), {"PYTHONPATH": str(STUB)}, 20.0
    )


def request(
    plan: Plan,
    logs: Path,
    *,
    owner: Owner | None = None,
    restart: int = 0,
    client: ClientPlan | None = None,
    idle_limit_s: float | None = 60.0,
) -> SessionRequest:
    """A session request on this test's interpreter."""
    python = Path(sys.executable)
    places = Places(serving_python=python, workflow_python=python, repository=REPOSITORY, model="stub-model")
    return SessionRequest(
        plan=plan,
        restart=restart,
        places=places,
        log_folder=logs,
        owner=Owner.current() if owner is None else owner,
        client=client,
        idle_limit_s=idle_limit_s,
    )
