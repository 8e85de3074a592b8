# SPDX-License-Identifier: Apache-2.0
"""vLLM's NixlConnector for machines with few cores: the same protocol, without two habits that cost a core.

Loaded by the engine alone, through `kv_connector_module_path` of its kv-transfer-config; nothing that is
installed is changed. The class keeps the name NixlConnector, because vLLM looks for that name in several
places.

- vLLM moves the worker's main thread to the last core of each NUMA node (`nixl/base_worker.py`, "reserve
  different cores for start_load_kv()"): two engines that were given a core each then share one. Here the
  thread goes back.
- NIXL's Python API builds its agent with `pthrDelay = 0` (`nixl_agent.__init__`), so that UCX's progress
  thread polls without pause and takes a core from the model. Here it pauses; a transfer is seen that much
  later at most.

`kv_connector_extra_config` may set `progress_pause_us` (microseconds, default 1000; 0 is NIXL's own habit).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.logger import init_logger

# Under vllm's own logger, whose level and form the engine has set.
logger = init_logger("vllm.splitbench.calm_nixl")

PROGRESS_PAUSE_US = 1000


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """The pull connector, made with a calm progress thread and left on the cores the engine was given."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if role != KVConnectorRole.WORKER:
            super().__init__(vllm_config, role, kv_cache_config)
            return
        pause_us = int(
            vllm_config.kv_transfer_config.get_from_extra_config("progress_pause_us", PROGRESS_PAUSE_US)
        )
        cores = os.sched_getaffinity(0)
        try:
            with _progress_pause(pause_us) as agents:
                super().__init__(vllm_config, role, kv_cache_config)
        finally:
            os.sched_setaffinity(0, cores)
        if not agents:
            raise RuntimeError("NIXL made its agent in an unknown way: its progress thread would spin")
        logger.info("NIXL progress thread pauses %d us; worker stays on cores %s", pause_us, sorted(cores))


class _Bindings:
    """NIXL's bindings, with an agent constructor that sets the pause in the config it is given."""

    def __init__(self, bindings: Any, pause_us: int, agents: list[str]) -> None:
        self._bindings = bindings
        self._pause_us = pause_us
        self._agents = agents

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802  NIXL's own name
        config.pthrDelay = self._pause_us
        self._agents.append(name)
        return self._bindings.nixlAgent(name, config)


@contextmanager
def _progress_pause(pause_us: int) -> Iterator[list[str]]:
    """While open, agents that NIXL's API makes in this process pause; gives the names of those made.

    The API sets the pause itself, after its caller's last word and right before it calls its bindings, so the
    bindings are the only place to say otherwise.
    """
    nixl_utils = importlib.import_module("vllm.distributed.nixl_utils")
    api = sys.modules[nixl_utils.NixlWrapper.__module__]
    bindings = api.nixlBind
    agents: list[str] = []
    api.nixlBind = _Bindings(bindings, pause_us, agents)  # type: ignore[attr-defined]
    try:
        yield agents
    finally:
        api.nixlBind = bindings  # type: ignore[attr-defined]
