# SPDX-License-Identifier: Apache-2.0
"""Render a layout of an experiment into its launch plan.

Rendering is pure: no clock, no disk, no look at the machine. What a connector wants is in `transfers`, the front doors
are in `front_doors`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from splitbench.errors import UserError
from splitbench.experiment.layouts import is_spread
from splitbench.experiment.models import (
    AggregatedLayout,
    EngineSpec,
    Experiment,
    MpsShare,
    PdLayout,
    ReplicasLayout,
)
from splitbench.serving import front_doors, transfers
from splitbench.serving.plan import LOOPBACK, Budget, EnginePlan, FirstToken, Plan, Role, ServicePlan
from splitbench.serving.transfers import Side, Transfer

DEFAULT_STARTUP_LIMIT_S = 900.0
# Any base gives the same digest; ports are where a layout listens, not what it is.
DIGEST_BASE_PORT = 20000


class _Ports:
    """Hands out ports upwards, past those that the config fixed."""

    def __init__(self, base: int, fixed: set[int], where: str) -> None:
        self._next, self._fixed, self._where = base, fixed, where

    def take(self, count: int = 1) -> list[int]:
        """The next free ports, not always adjacent."""
        return [self.run(1)[0] for _ in range(count)]

    def run(self, count: int) -> list[int]:
        """The next `count` free ports that are adjacent."""
        while taken := self._fixed & set(range(self._next, self._next + count)):
            self._next = max(taken) + 1
        if self._next + count > 65536:
            raise UserError(
                "there are not enough ports above node.base_port", where=self._where, mend="lower it"
            )
        self._next += count
        return list(range(self._next - count, self._next))


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

    shared = _mps_devices(layout)
    common: dict[str, Any] = {
        "layout": name,
        "budget": _budget(layout),
        "served_model": experiment.model.name,
        "services": (_mps_daemon(shared),) if shared else (),
    }
    if isinstance(layout, AggregatedLayout):
        engine = _engine(experiment, layout, layout, "engine-0", "aggregated", http_port(layout))
        return Plan(kind="aggregated", engines=(engine,), **common)
    front = ports.take()[0]
    if isinstance(layout, ReplicasLayout):
        engines = tuple(
            _engine(experiment, layout, spec, f"engine-{index}", "aggregated", http_port(spec))
            for index, spec in enumerate(layout.replicas)
        )
        proxy = (
            front_doors.vllm_router(front, ports.take()[0], engines)
            if layout.router == "vllm-router"
            else front_doors.round_robin(front, engines, trace=layout.trace)
        )
        return Plan(kind="replicas", engines=engines, proxy=proxy, **common)
    return _pd_plan(experiment, layout, front, ports, http_port, common)


def _pd_plan(
    experiment: Experiment,
    layout: PdLayout,
    front: int,
    ports: _Ports,
    http_port: Any,
    common: dict[str, Any],
) -> Plan:
    notify = ports.take()[0] if layout.connector == "lmcache" else None
    files: dict[str, str] = {}
    engines: list[EnginePlan] = []
    if layout.connector == "lmcache-mp":
        common["services"] += (transfers.lmcache_server(layout, *ports.take(3)),)
    sides: tuple[tuple[Side, list[EngineSpec]], ...] = (
        ("prefill", layout.prefill),
        ("decode", layout.decode),
    )
    for side, specs in sides:
        for index, spec in enumerate(specs):
            name, port = f"{side}-{index}", http_port(spec)
            transfer = _transfer(layout, side, name, spec, ports, notify, common["services"])
            if transfer.file is not None:
                files[f"{name}.lmcache.yaml"] = transfer.file
            engines.append(_engine(experiment, layout, spec, name, side, port, transfer))
    first_token: FirstToken = layout.first_token or (
        "prefiller" if layout.connector == "lmcache" else "decoder"
    )
    proxy = (
        front_doors.vllm_router(front, ports.take()[0], engines)
        if layout.router == "vllm-router"
        else front_doors.pd_proxy(layout.connector, first_token, front, notify, engines, trace=layout.trace)
    )
    return Plan(
        kind="pd",
        connector=layout.connector,
        first_token=first_token,
        engines=tuple(engines),
        proxy=proxy,
        files=files,
        **common,
    )


def _transfer(
    layout: PdLayout,
    side: Side,
    name: str,
    spec: EngineSpec,
    ports: _Ports,
    notify: int | None,
    services: tuple[ServicePlan, ...],
) -> Transfer:
    if layout.connector == "nixl":
        return transfers.nixl(layout, side, spec, ports.run(spec.parallel), address(layout, spec))
    if layout.connector == "lmcache-mp":
        return transfers.lmcache_mp(services[-1].ports[0])
    assert notify is not None
    own = [] if side == "prefill" else ports.take(2 * spec.tensor_parallel)
    hosts = ("{node0}" if is_spread(layout.engines()) else LOOPBACK), address(layout, spec)
    return transfers.lmcache(layout, side, name, spec, notify, own, hosts)


# -- shares ----------------------------------------------------------------------------------------------------
def _mps_devices(layout: AggregatedLayout | ReplicasLayout | PdLayout) -> list[int]:
    """GPUs that CUDA MPS divides, in the order in which its daemon counts them."""
    specs = [spec for spec in layout.engines() if isinstance(spec.share, MpsShare)]
    return sorted({device for spec in specs for device in spec.devices})


def _budget(layout: AggregatedLayout | ReplicasLayout | PdLayout) -> Budget:
    shares = [spec.share for spec in layout.engines() if spec.share is not None]
    percents = [str(share.mps_percent) for share in shares if isinstance(share, MpsShare)]
    words = ([f"mps {'+'.join(percents)}"] if percents else []) + (
        ["time-sliced"] if len(percents) < len(shares) else []
    )
    return Budget(
        kind="cores" if layout.engines()[0].cores is not None else "gpus",
        count=len({place for spec in layout.engines() for place in spec.places}),
        share=", ".join(words) or None,
    )


def _mps_daemon(devices: list[int]) -> ServicePlan:
    """A daemon of the session's own: it ends with it, and knows no GPU of others."""
    return ServicePlan(
        name="mps",
        argv=("nvidia-cuda-mps-control", "-f"),
        env={
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
            "CUDA_MPS_PIPE_DIRECTORY": "{runtime}",
            "CUDA_MPS_LOG_DIRECTORY": "{session}",
        },
        ready_file="{runtime}/control",
    )


def _gpus(layout: AggregatedLayout | ReplicasLayout | PdLayout, spec: EngineSpec) -> dict[str, str]:
    if not isinstance(spec.share, MpsShare):
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, spec.devices))}
    # A client of MPS counts the daemon's GPUs, not the machine's.
    seen = _mps_devices(layout)
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(str(seen.index(device)) for device in spec.devices),
        "CUDA_MPS_PIPE_DIRECTORY": "{runtime}",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(spec.share.mps_percent),
    }


# -- engines ---------------------------------------------------------------------------------------------------
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


def address(layout: AggregatedLayout | ReplicasLayout | PdLayout, spec: EngineSpec) -> str:
    """Where an engine listens: on loopback, unless others of the layout are on another node."""
    return f"{{node{spec.node}}}" if is_spread(layout.engines()) else LOOPBACK


def _elsewhere(spec: EngineSpec, ports: tuple[int, ...]) -> list[str]:
    """What starts a command on another node, and ends with it."""
    if not spec.node:
        return []
    kind = "--cores" if spec.cores is not None else "--gpus"
    return [
        *("{workflow_python}", "-m", "splitbench.cluster.remote", "--node", str(spec.node)),
        *("--ports", ",".join(map(str, ports)), kind, ",".join(map(str, spec.devices))),
    ]


def _engine(
    experiment: Experiment,
    layout: AggregatedLayout | ReplicasLayout | PdLayout,
    spec: EngineSpec,
    name: str,
    role: Role,
    port: int,
    transfer: Transfer | None = None,
) -> EnginePlan:
    levels = (experiment.engine, layout, spec)
    args = {flag: value for level in levels for flag, value in level.args.items()}
    memory = {"gpu-memory-utilization": spec.memory_share, "kv-cache-memory-bytes": spec.kv_cache_bytes}
    stated = {flag: value for flag, value in memory.items() if value is not None}
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
        owned |= _gpus(layout, spec)
    host = address(layout, spec)
    parallel = [
        ("--tensor-parallel-size", spec.tensor_parallel),
        ("--pipeline-parallel-size", spec.pp),
        ("--data-parallel-size", spec.dp),
    ]
    argv = [
        *("{serving_python}", "-m", "vllm.entrypoints.cli.main", "serve", "{model}"),
        *("--served-model-name", experiment.model.name, "--host", host, "--port", str(port)),
        *(text for flag, size in parallel if size > 1 for text in (flag, str(size))),
        *(("--revision", experiment.model.revision) if experiment.model.revision else ()),
        *flags(stated),
        *flags({flag: value for flag, value in args.items() if flag not in stated}),
    ]
    transfer = transfer or Transfer({})
    if transfer.config:
        config = json.dumps(transfer.config, sort_keys=True, separators=(",", ":"))
        argv += ["--kv-transfer-config", config]
    limits = [level.startup_limit_s for level in levels if level.startup_limit_s is not None]
    return EnginePlan(
        name=name,
        role=role,
        node=spec.node,
        devices=tuple(spec.devices),
        host=host,
        port=port,
        other_ports=transfer.ports,
        argv=(*_elsewhere(spec, (port, *transfer.ports)), *argv),
        env=owned | transfer.env | {key: value for level in levels for key, value in level.env.items()},
        startup_limit_s=limits[-1] if limits else DEFAULT_STARTUP_LIMIT_S,
    )
