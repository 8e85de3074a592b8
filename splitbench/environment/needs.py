# SPDX-License-Identifier: Apache-2.0
"""What an experiment asks of a machine, read off its launch plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import yaml

from splitbench.serving.plan import EnginePlan, Plan, ServicePlan

GIB = 2**30
# Variables of engines that rules look at.
READ_BY_RULES = ("PYTHONHASHSEED", "VLLM_USE_V2_MODEL_RUNNER")


@dataclass(frozen=True)
class EngineNeed:
    """One engine.

    Args:
        name: `layout/engine`, for messages.
        devices: GPU indices or cores.
        env: variables that it is started with.
        lmcache: whether LMCache runs inside it.
        moves_packed_kv: whether that LMCache is mended to move rows of keys and values side by side.
        host_bytes: host memory that its ranks set aside at the start, all together.
    """

    name: str
    layout: str
    devices: tuple[int, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    lmcache: bool = False
    moves_packed_kv: bool = False
    host_bytes: int = 0


@dataclass(frozen=True)
class Needs:
    """All layouts of an experiment; only one of them is up at a time.

    Args:
        kind: `gpus` or `cores`.
        engines: every engine of every layout.
        connectors: of the PD layouts.
        ports: that sessions bind.
        session_up: whether a session of ours is up already, whose ports and processes are no strangers.
    """

    kind: str
    engines: tuple[EngineNeed, ...] = ()
    connectors: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    session_up: bool = False

    @property
    def by_nixl(self) -> bool:
        """Whether some layout moves KV cache by NIXL."""
        return bool({"nixl", "lmcache"} & set(self.connectors))

    @property
    def by_lmcache(self) -> bool:
        """Whether some layout moves KV cache by LMCache, inside engines or by its server."""
        return bool({"lmcache", "lmcache-mp"} & set(self.connectors))

    @property
    def devices(self) -> tuple[int, ...]:
        """Every GPU or core that some layout occupies."""
        return tuple(sorted({device for engine in self.engines for device in engine.devices}))

    @property
    def layouts(self) -> dict[str, list[EngineNeed]]:
        """Engines by layout."""
        found: dict[str, list[EngineNeed]] = {}
        for engine in self.engines:
            found.setdefault(engine.layout, []).append(engine)
        return found


def needs_of(plans: Mapping[str, Plan], *, session_up: bool = False) -> Needs:
    """What these layouts need."""
    kinds = {plan.budget.kind for plan in plans.values()}
    return Needs(
        kind="gpus" if "gpus" in kinds else "cores",
        engines=tuple(
            need
            for layout, plan in plans.items()
            for need in (
                *(_engine(layout, engine, plan) for engine in plan.engines),
                *(_service(layout, service) for service in plan.services),
            )
        ),
        connectors=tuple(sorted({plan.connector for plan in plans.values() if plan.connector})),
        ports=tuple(sorted({port for plan in plans.values() for port in plan.ports})),
        session_up=session_up,
    )


def _service(layout: str, service: ServicePlan) -> EngineNeed:
    """A server beside the engines: LMCache's keeps chunks in host memory."""
    size = 0.0
    for flag, value in pairwise(service.argv):
        if flag == "--l1-size-gb":
            size = float(value)
    return EngineNeed(name=f"{layout}/{service.name}", layout=layout, devices=(), host_bytes=int(size * GIB))


def _engine(layout: str, engine: EnginePlan, plan: Plan) -> EngineNeed:
    text = plan.files.get(f"{engine.name}.lmcache.yaml")
    config = yaml.safe_load(text) if text else {}
    ranks = len(engine.devices) if plan.budget.kind == "gpus" else 1
    host_bytes = 0.0
    if config.get("pd_buffer_device") == "cpu":
        host_bytes += float(config.get("pd_buffer_size", 0))
    host_bytes += float(config.get("max_local_cpu_size", 0)) * GIB
    if plan.budget.kind == "cores":
        host_bytes += float(engine.env.get("VLLM_CPU_KVCACHE_SPACE") or 0) * GIB
    return EngineNeed(
        name=f"{layout}/{engine.name}",
        layout=layout,
        devices=engine.devices,
        env=engine.env,
        lmcache=text is not None,
        moves_packed_kv=text is not None and any("packed-kv" in argument for argument in engine.argv),
        host_bytes=int(host_bytes * ranks),
    )
