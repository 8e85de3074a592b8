# SPDX-License-Identifier: Apache-2.0
"""vLLM's LMCacheConnectorV1 whose saves are finished when they say so.

LMCache (0.5.2, `gpu_connectors.py`, `from_gpu`) launches the kernel that gathers the paged KV cache on a stream of its
own, and waits for it only where the target is host memory. With a transfer buffer on the GPU two things go on while it
may still wait for its turn: the table of slots that it reads is freed, and PyTorch gives that memory to the next
tensor of the engine's own stream; and NIXL sends the buffer. The first reads through garbage (an illegal memory access
in `wait_for_save` or in whatever call notices it; LMCache/LMCache#3536 names the table), the second sends old KV. On a
GPU that prefill and decode share by turns it waits long enough for both, from about 16 requests in flight.

Here the stream is waited for after every save. Loaded by the prefill engines alone, through `kv_connector_module_path`;
nothing that is installed is changed.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import (
    LMCacheConnectorV1 as _LMCacheConnectorV1,
)
from vllm.logger import init_logger

# Under vllm's own logger, whose level and form the engine has set.
logger = init_logger("vllm.splitbench.waited_lmcache")


class LMCacheConnectorV1(_LMCacheConnectorV1):  # type: ignore[misc]
    """The same connector; the first save of a process makes all of them wait."""

    _waits = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def wait_for_save(self) -> None:
        """Gather and hand over what this step computed; done when this returns."""
        if not self._waits:
            # None in LMCache's degraded mode, where nothing is saved.
            engine = self._lmcache_engine.lmcache_engine
            if engine is not None:
                wait_after_saves(engine.gpu_connector)
                logger.info("saves are waited for")
                self._waits = True
        super().wait_for_save()


def wait_after_saves(connector: Any) -> None:
    """Make a GPU connector of LMCache wait for its stream after each gather.

    Raises:
        AttributeError: this LMCache has no such stream: better no engine than one that only seems to wait.
    """
    save, stream = connector.from_gpu, connector.store_stream

    def waited(*arguments: Any, **keywords: Any) -> Any:
        result = save(*arguments, **keywords)
        stream.synchronize()
        return result

    connector.from_gpu = waited
