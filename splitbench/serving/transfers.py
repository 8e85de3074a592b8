# SPDX-License-Identifier: Apache-2.0
"""What each connector wants of an engine so that KV moves: configuration, environment, ports, files, a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from splitbench.experiment.models import EngineSpec, PdLayout
from splitbench.serving.plan import LOOPBACK, ServicePlan

GIB = 1024**3
# LMCache's own default; on CPU vLLM's blocks have 128 tokens, and chunks move whole.
CHUNK_TOKENS, CHUNK_TOKENS_ON_CORES = 256, 128

# The stock connector spins a core in UCX's progress thread and moves the worker to a shared core; on a machine with
# as many cores as engines that is the whole measurement. See splitbench/serving/calm_nixl.py.
CALM_NIXL = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "splitbench.serving.calm_nixl",
}
# Loaded by engines whose LMCache connector is to be mended.
REPAIRED_LMCACHE = {"kv_connector_module_path": "splitbench.serving.repaired_lmcache"}

# One line per connection about the transports that it takes: the only proof of how KV moved.
UCX_SAYS = {"UCX_LOG_LEVEL": "info"}

Side = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Transfer:
    """One engine's side: its kv-transfer-config, environment, ports beyond HTTP, and its file's text if it has one."""

    config: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()
    file: str | None = None


def buffer_device(layout: PdLayout, spec: EngineSpec) -> str:
    """Where an engine's transfer buffers are: as the layout says, else with the engine."""
    return layout.kv_buffer_device or ("cpu" if spec.cores is not None else "cuda")


def nixl(
    layout: PdLayout, side: Side, spec: EngineSpec, ports: Sequence[int], host: str = LOOPBACK
) -> Transfer:
    """vLLM's NixlConnector; `ports` are consecutive, one per rank: vLLM counts upwards from the first."""
    config: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if side == "prefill" else "kv_consumer",
        "kv_buffer_device": buffer_device(layout, spec),
    }
    if layout.connector_options:
        config["kv_connector_extra_config"] = dict(layout.connector_options)
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[0]),
        **UCX_SAYS,
    }
    if spec.cores is not None:
        config |= CALM_NIXL
        env |= {"PYTHONPATH": "{repository}", "UCX_TLS": "tcp,shm,self"}
    return Transfer(config, env, tuple(ports))


def lmcache(
    layout: PdLayout,
    side: Side,
    name: str,
    spec: EngineSpec,
    notify: int,
    ports: Sequence[int],
    hosts: tuple[str, str] = (LOOPBACK, LOOPBACK),
) -> Transfer:
    """LMCache in the engine's own processes, over NIXL.

    Args:
        notify: where senders report to the proxy.
        ports: of a receiver, its init ports, then its alloc ports, one of each per rank; a sender has none.
        hosts: addresses of the proxy and of this engine.
    """
    sends = side == "prefill"
    inits, allocs = list(ports[: spec.tensor_parallel]), list(ports[spec.tensor_parallel :])
    content: dict[str, Any] = {
        "local_cpu": False,
        "max_local_cpu_size": 0,
        "save_decode_cache": False,
        "enable_pd": True,
        "transfer_channel": "nixl",
        "nixl_backends": ["UCX"],
        "pd_role": "sender" if sends else "receiver",
        "pd_buffer_size": int(layout.kv_buffer_gb * GIB),
        "pd_buffer_device": buffer_device(layout, spec),
    }
    if sends:
        content |= {"pd_proxy_host": hosts[0], "pd_proxy_port": notify}
    else:
        content |= {"pd_peer_host": hosts[1], "pd_peer_init_port": inits, "pd_peer_alloc_port": allocs}
    extra: dict[str, Any] = {"discard_partial_chunks": False, "lmcache_rpc_port": name}
    if not sends:
        extra["skip_last_n_tokens"] = 1
    repairs = [name for name in layout.lmcache_repairs if sends or name != "waited-saves"]
    if repairs:
        extra["splitbench.repairs"] = repairs
    return Transfer(
        config={
            "kv_connector": "LMCacheConnectorV1",
            "kv_role": "kv_producer" if sends else "kv_consumer",
            "kv_connector_extra_config": extra | layout.connector_options,
        }
        | (REPAIRED_LMCACHE if repairs else {}),
        env={
            "LMCACHE_CONFIG_FILE": "{session}/" + f"{name}.lmcache.yaml",
            "LMCACHE_TRACK_USAGE": "false",
            "PYTHONHASHSEED": "0",  # both sides must name chunks alike
            **UCX_SAYS,
        }
        | ({"PYTHONPATH": "{repository}"} if repairs else {}),
        ports=tuple(ports),
        file=yaml.safe_dump(content | layout.lmcache_options, sort_keys=True),
    )


def lmcache_mp(server_port: int) -> Transfer:
    """LMCache in a server of its own: both sides are its clients and do the same."""
    return Transfer(
        config={
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{LOOPBACK}",
                "lmcache.mp.port": server_port,
            },
        },
        env={"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"},
    )


def lmcache_server(layout: PdLayout, port: int, http_port: int, metrics_port: int) -> ServicePlan:
    """LMCache's server, which must be up before the engines."""
    on_cores = layout.prefill[0].cores is not None
    chunk = layout.kv_chunk_tokens or (CHUNK_TOKENS_ON_CORES if on_cores else CHUNK_TOKENS)
    return ServicePlan(
        name="lmcache",
        ports=(port, http_port, metrics_port),
        argv=(
            *("{serving_python}", "-m", "lmcache.cli.main", "server"),
            *(
                "--l1-size-gb",
                f"{layout.kv_buffer_gb:g}",
                "--chunk-size",
                str(chunk),
                "--eviction-policy",
                "LRU",
            ),
            *("--host", LOOPBACK, "--port", str(port)),
            *("--http-host", LOOPBACK, "--http-port", str(http_port)),
            *("--prometheus-port", str(metrics_port)),
            # Its default serves GPUs only; engines on cores then hang at their start.
            *("--supported-transfer-mode", "auto"),
        ),
        env={"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"},
        health_port=http_port,
        health_path="/healthcheck",
    )
