# SPDX-License-Identifier: Apache-2.0
"""Render a layout of an experiment into its launch plan.

Rendering is pure: no clock, no disk, no look at the machine. What the protocols want is stated in docs/protocols.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from splitbench.errors import UserError
from splitbench.experiment.models import (
    AggregatedLayout,
    EngineSpec,
    Experiment,
    PdLayout,
    ReplicasLayout,
)
from splitbench.serving.plan import Budget, Connector, EnginePlan, FirstToken, Plan, ProxyPlan, Role

LOOPBACK = "127.0.0.1"
DEFAULT_STARTUP_LIMIT_S = 900.0
# Any base gives the same digest; ports are where a layout listens, not what it is.
DIGEST_BASE_PORT = 20000
GIB = 1024**3


class _Ports:
    """Hands out ports upwards, past those that the config fixed."""

    def __init__(self, base: int, fixed: set[int], where: str) -> None:
        self._next, self._fixed, self._where = base, fixed, where

    def take(self, count: int = 1) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            if self._next > 65535:
                raise UserError(
                    "there are not enough ports above node.base_port", where=self._where, mend="lower it"
                )
            if self._next not in self._fixed:
                taken.append(self._next)
            self._next += 1
        return taken


def render(experiment: Experiment, name: str) -> Plan:
    """The launch plan of one layout, with the ports of this node.

    Raises:
        UserError: there are not enough ports above `node.base_port`.
        KeyError: there is no such layout.
    """
    return _render(experiment, name, experiment.node.base_port, keep_fixed_ports=True)


def plan_digest(experiment: Experiment, name: str) -> str:
    """sha256 of what the layout starts, whatever the ports are on this node."""
    return _render(experiment, name, DIGEST_BASE_PORT, keep_fixed_ports=False).digest


def _render(experiment: Experiment, name: str, base_port: int, *, keep_fixed_ports: bool) -> Plan:
    layout = experiment.layouts[name]
    fixed = {spec.port for spec in layout.engines() if spec.port is not None} if keep_fixed_ports else set()
    ports = _Ports(base_port, fixed, f"layouts.{name}")

    def http_port(spec: EngineSpec) -> int:
        return spec.port if keep_fixed_ports and spec.port is not None else ports.take()[0]

    budget = Budget(
        kind="cores" if layout.engines()[0].cores is not None else "gpus",
        count=len({device for spec in layout.engines() for device in spec.devices}),
    )
    common: dict[str, Any] = {"layout": name, "budget": budget, "served_model": experiment.model.name}
    if isinstance(layout, AggregatedLayout):
        engine = _engine(experiment, layout, layout, "engine-0", "aggregated", http_port(layout))
        return Plan(kind="aggregated", engines=(engine,), **common)
    if isinstance(layout, ReplicasLayout):
        front = ports.take()[0]
        engines = tuple(
            _engine(experiment, layout, spec, f"engine-{index}", "aggregated", http_port(spec))
            for index, spec in enumerate(layout.replicas)
        )
        if layout.router == "vllm-router":
            urls = ["--worker-urls", *(f"http://{engine.host}:{engine.port}" for engine in engines)]
            return Plan(
                kind="replicas", engines=engines, proxy=_vllm_router(front, ports.take()[0], urls), **common
            )
        return Plan(kind="replicas", engines=engines, proxy=_round_robin(front, engines), **common)
    front = ports.take()[0]
    notify = ports.take()[0] if layout.connector == "lmcache" else None
    files: dict[str, str] = {}
    engines = tuple(
        _pd_engine(experiment, layout, role, index, spec, http_port(spec), ports, notify, files)
        for role, specs in (("prefill", layout.prefill), ("decode", layout.decode))
        for index, spec in enumerate(specs)
    )
    first_token: FirstToken = layout.first_token or (
        "prefiller" if layout.connector == "lmcache" else "decoder"
    )
    return Plan(
        kind="pd",
        connector=layout.connector,
        first_token=first_token,
        engines=engines,
        proxy=(
            _vllm_router(front, ports.take()[0], _nixl_urls(engines))
            if layout.router == "vllm-router"
            else _pd_proxy(layout.connector, first_token, front, notify, engines)
        ),
        files=files,
        **common,
    )


def flags(args: Mapping[str, Any]) -> Iterator[str]:
    """Config's mapping of flags as argv: true is a bare flag, false its `--no-` form, null leaves it out."""
    for flag, value in sorted(args.items()):
        if value is None:
            continue
        if value is True:
            yield f"--{flag}"
        elif value is False:
            yield f"--no-{flag}"
        elif isinstance(value, dict):
            yield from (f"--{flag}", json.dumps(value, sort_keys=True, separators=(",", ":")))
        elif isinstance(value, list):
            yield from (f"--{flag}", *map(str, value))
        else:
            yield from (f"--{flag}", str(value))


def _engine(
    experiment: Experiment,
    layout: AggregatedLayout | ReplicasLayout | PdLayout,
    spec: EngineSpec,
    name: str,
    role: Role,
    port: int,
    *,
    kv_transfer: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    other_ports: tuple[int, ...] = (),
) -> EnginePlan:
    levels = (experiment.engine, layout, spec)
    args = {flag: value for level in levels for flag, value in level.args.items()}
    owned = {
        "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache between cells; the server is on loopback
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if experiment.model.hub is None:
        owned |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if spec.cores is not None:
        cores = ",".join(map(str, spec.cores))
        owned["VLLM_CPU_OMP_THREADS_BIND"] = cores
        # vLLM's own binding is not applied when model and scheduler share a process; this one always is. Threads that
        # are not pinned spin or wander, and the client then sees tokens in bunches.
        owned |= {"OMP_NUM_THREADS": str(len(spec.cores)), "GOMP_CPU_AFFINITY": cores}
    else:
        owned["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.devices))
    parallel = [
        ("--tensor-parallel-size", spec.tensor_parallel),
        ("--pipeline-parallel-size", spec.pp),
        ("--data-parallel-size", spec.dp),
    ]
    argv = [
        *("{serving_python}", "-m", "vllm.entrypoints.cli.main", "serve", "{model}"),
        *("--served-model-name", experiment.model.name, "--host", LOOPBACK, "--port", str(port)),
        *(text for flag, size in parallel if size > 1 for text in (flag, str(size))),
        *(("--revision", experiment.model.revision) if experiment.model.revision else ()),
        *(("--gpu-memory-utilization", str(spec.memory_share)) if spec.memory_share else ()),
        *flags(args),
    ]
    if kv_transfer is not None:
        argv += ["--kv-transfer-config", json.dumps(kv_transfer, sort_keys=True, separators=(",", ":"))]
    limits = [level.startup_limit_s for level in levels if level.startup_limit_s is not None]
    return EnginePlan(
        name=name,
        role=role,
        devices=tuple(spec.devices),
        host=LOOPBACK,
        port=port,
        other_ports=other_ports,
        argv=tuple(argv),
        env=owned | dict(env or {}) | {key: value for level in levels for key, value in level.env.items()},
        startup_limit_s=limits[-1] if limits else DEFAULT_STARTUP_LIMIT_S,
    )


def _pd_engine(
    experiment: Experiment,
    layout: PdLayout,
    role: Any,
    index: int,
    spec: EngineSpec,
    port: int,
    ports: _Ports,
    notify: int | None,
    files: dict[str, str],
) -> EnginePlan:
    name = f"{role}-{index}"
    device = layout.kv_buffer_device or ("cpu" if spec.cores is not None else "cuda")
    if layout.connector == "nixl":
        side = ports.take(spec.parallel)
        transfer: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
            "kv_buffer_device": device,
        }
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side[0])}
        if spec.cores is not None:
            transfer |= CALM_NIXL
            env |= {"PYTHONPATH": "{repository}", "UCX_TLS": "tcp,shm,self"}
        return _engine(
            experiment, layout, spec, name, role, port, kv_transfer=transfer, env=env, other_ports=tuple(side)
        )
    if layout.connector == "lmcache":
        sends = role == "prefill"
        other = [] if sends else ports.take(2 * spec.tensor_parallel)
        inits, allocs = other[: spec.tensor_parallel], other[spec.tensor_parallel :]
        files[f"{name}.lmcache.yaml"] = _lmcache_file(layout, device, notify, inits, allocs, sends=sends)
        transfer = {
            "kv_connector": "LMCacheConnectorV1",
            "kv_role": "kv_producer" if sends else "kv_consumer",
            "kv_connector_extra_config": {"discard_partial_chunks": False, "lmcache_rpc_port": name}
            | ({} if sends else {"skip_last_n_tokens": 1}),
        }
        env = {
            "LMCACHE_CONFIG_FILE": "{session}/" + f"{name}.lmcache.yaml",
            "LMCACHE_TRACK_USAGE": "false",
            "PYTHONHASHSEED": "0",  # both sides must name chunks alike
        }
        return _engine(
            experiment,
            layout,
            spec,
            name,
            role,
            port,
            kv_transfer=transfer,
            env=env,
            other_ports=tuple(other),
        )
    raise UserError(
        "connector 'lmcache-mp' is not available yet", where=f"layouts.{name}", mend="use nixl or lmcache"
    )


# The stock connector spins a core in UCX's progress thread and moves the worker to a shared core; on a machine with
# as many cores as engines that is the whole measurement. See splitbench/serving/calm_nixl.py.
CALM_NIXL = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "splitbench.serving.calm_nixl",
}


def _lmcache_file(
    layout: PdLayout,
    device: str,
    notify: int | None,
    inits: list[int],
    allocs: list[int],
    *,
    sends: bool,
) -> str:
    config: dict[str, Any] = {
        "local_cpu": False,
        "max_local_cpu_size": 0,
        "save_decode_cache": False,
        "enable_pd": True,
        "transfer_channel": "nixl",
        "nixl_backends": ["UCX"],
        "pd_role": "sender" if sends else "receiver",
        "pd_buffer_size": int(layout.kv_buffer_gb * GIB),
        "pd_buffer_device": device,
    }
    if sends:
        config |= {"pd_proxy_host": LOOPBACK, "pd_proxy_port": notify}
    else:
        config |= {"pd_peer_host": LOOPBACK, "pd_peer_init_port": inits, "pd_peer_alloc_port": allocs}
    return yaml.safe_dump(config, sort_keys=True)


def _side(flag: str, engines: list[EnginePlan]) -> list[str]:
    return [
        *(f"--{flag}-host", ",".join(engine.host for engine in engines)),
        *(f"--{flag}-port", ",".join(str(engine.port) for engine in engines)),
        *(f"--num-{flag}s", str(len(engines))),
    ]


def _proxy(mode: str, front: int, arguments: list[str], other_ports: tuple[int, ...] = ()) -> ProxyPlan:
    return ProxyPlan(
        host=LOOPBACK,
        port=front,
        other_ports=other_ports,
        argv=(
            *("{workflow_python}", "-m", "splitbench.proxy", "--mode", mode),
            *("--host", LOOPBACK, "--port", str(front), *arguments),
        ),
        env={"PYTHONPATH": "{repository}"},
    )


def _round_robin(front: int, engines: tuple[EnginePlan, ...]) -> ProxyPlan:
    return _proxy("round-robin", front, _side("decoder", list(engines)))


def _nixl_urls(engines: tuple[EnginePlan, ...]) -> list[str]:
    arguments = ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    for engine in engines:
        arguments += [f"--{engine.role}", f"http://{engine.host}:{engine.port}"]
    return arguments


def _vllm_router(front: int, metrics_port: int, arguments: list[str]) -> ProxyPlan:
    """The router of the vLLM project, from PyPI; benchmarks/proxy compares it with ours."""
    return ProxyPlan(
        host=LOOPBACK,
        port=front,
        other_ports=(metrics_port,),
        argv=(
            *(
                "{serving_python}",
                "-m",
                "vllm_router.launch_router",
                "--host",
                LOOPBACK,
                "--port",
                str(front),
            ),
            *("--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port)),
            # Its default refuses requests above a number in flight.
            *("--policy", "round_robin", "--max-concurrent-requests", "65536", "--log-level", "warning"),
            *arguments,
        ),
    )


def _pd_proxy(
    connector: Connector,
    first_token: FirstToken,
    front: int,
    notify: int | None,
    engines: tuple[EnginePlan, ...],
) -> ProxyPlan:
    prefill = [engine for engine in engines if engine.role == "prefill"]
    decode = [engine for engine in engines if engine.role == "decode"]
    arguments = _side("prefiller", prefill) + _side("decoder", decode)
    if connector == "nixl":
        return _proxy("nixl", front, arguments)
    # The lists are flat, in the decoders' order: first all ranks of decoder 0, then those of decoder 1.
    inits = [port for engine in decode for port in engine.other_ports[: len(engine.other_ports) // 2]]
    allocs = [port for engine in decode for port in engine.other_ports[len(engine.other_ports) // 2 :]]
    arguments += [
        *("--decoder-init-port", ",".join(map(str, inits))),
        *("--decoder-alloc-port", ",".join(map(str, allocs))),
        *("--proxy-host", LOOPBACK, "--proxy-port", str(notify)),
        *("--first-token", first_token),
    ]
    return _proxy("lmcache", front, arguments, other_ports=(notify,) if notify is not None else ())
