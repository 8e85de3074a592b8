# SPDX-License-Identifier: Apache-2.0
"""vLLM's LMCacheConnectorV1 with two faults of LMCache's GPU connector mended, where a layout asks for it.

`waited-saves`. LMCache (0.5.2, `gpu_connectors.py`, `from_gpu`) launches the kernel that gathers the paged KV cache on
a stream of its own, and waits for it only where the target is host memory. With a transfer buffer on the GPU two
things go on while it may still wait for its turn: the table of slots that it reads is freed, and PyTorch gives that
memory to the next tensor of the engine's own stream; and NIXL sends the buffer. The first reads through garbage (an
illegal memory access in `wait_for_save` or in whatever call notices it; LMCache/LMCache#3536 names the table), the
second sends old KV. On a GPU that prefill and decode share by turns it waits long enough for both, from about 16
requests in flight. Here the stream is waited for after every save.

`packed-kv`. Since 0.26 vLLM keeps keys and values of a head side by side (vllm-project/vllm#44455), so a token's row in
a layer is twice as long as LMCache's in-process path takes it to be: slots overlap, and half of what is moved is
missing, without a word (LMCache/LMCache#4463, open in 0.5.4). Here a chunk's memory is taken as one row of both per
token; kernel, bytes per chunk and what NIXL sends stay the same. Both sides must do it.

Loaded by engines through `kv_connector_module_path`; nothing that is installed is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import (
    LMCacheConnectorV1 as _LMCacheConnectorV1,
)
from vllm.logger import init_logger

# Under vllm's own logger, whose level and form the engine has set.
logger = init_logger("vllm.splitbench.repaired_lmcache")

# The key of kv_connector_extra_config that names the repairs.
KEY = "splitbench.repairs"


class LMCacheConnectorV1(_LMCacheConnectorV1):  # type: ignore[misc]
    """The same connector; its GPU connector is mended before the first load or save."""

    _mended = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        # vLLM 0.11.0 gives and takes two arguments; later ones look for the third by its name.
        more = () if kv_cache_config is None else (kv_cache_config,)
        super().__init__(vllm_config, role, *more)
        self._repairs = list(vllm_config.kv_transfer_config.get_from_extra_config(KEY, []))

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        """Load what was sent for the requests of this step."""
        self._mend()
        super().start_load_kv(forward_context, **more)

    def wait_for_save(self) -> None:
        """Gather and hand over what this step computed."""
        self._mend()
        super().wait_for_save()

    def _mend(self) -> None:
        # No engine: LMCache's degraded mode, where nothing is moved.
        engine = self._lmcache_engine.lmcache_engine
        if self._mended or engine is None:
            return
        for name, repair in REPAIRS.items():
            if name in self._repairs:
                repair(engine.gpu_connector)
        logger.info("mended: %s", ", ".join(self._repairs))
        self._mended = True


def move_packed_rows(connector: Any) -> None:
    """Make a GPU connector of LMCache move whole rows where vLLM keeps keys and values side by side.

    Raises (when something is moved):
        RuntimeError: heads come before tokens; a chunk's rows would not lie together.
    """
    import torch
    from lmcache import c_ops

    stock = {"to_gpu": connector.to_gpu, "from_gpu": connector.from_gpu}
    packed, heads_first = (
        getattr(c_ops.EngineKVFormat, name, None) for name in ("NL_X_NB_BS_NH_TWO_HS", "NL_X_NB_NH_BS_TWO_HS")
    )

    def move(way: str, memory: Any, start: int, end: int, more: dict[str, Any]) -> Any:
        connector.initialize_kvcaches_ptr(**more)
        pointers = connector._initialize_pointers(connector.kvcaches)
        kind = connector.engine_kv_format
        if heads_first is not None and kind == heads_first:
            raise RuntimeError("KV cache with heads before tokens is not mended; unset VLLM_KV_CACHE_LAYOUT")
        if kind != packed:
            return stock[way](memory, start, end, **more)
        chunk = memory.tensor
        planes, layers, tokens, width = chunk.shape
        cached = more.get("vllm_cached_tokens", 0) if way == "to_gpu" else 0
        c_ops.multi_layer_kv_transfer(
            chunk.view(1, layers, tokens, planes * width),
            pointers,
            more["slot_mapping"][start:end],
            connector.kvcaches[0].device,
            connector.page_buffer_size,
            c_ops.TransferDirection.H2D if way == "to_gpu" else c_ops.TransferDirection.D2H,
            # One row per token and layer, whatever is in it.
            c_ops.EngineKVFormat.NL_X_NB_BS_HS,
            block_size=connector.block_size,
            skip_prefix_n_tokens=min(end - start, max(0, cached - start)),
        )
        return None

    def to_gpu(memory: Any, start: int, end: int, **more: Any) -> Any:
        return move("to_gpu", memory, start, end, more)

    def from_gpu(memory: Any, start: int, end: int, **more: Any) -> Any:
        with torch.cuda.stream(connector.store_stream):
            result = move("from_gpu", memory, start, end, more)
        if not memory.tensor.is_cuda:
            connector.store_stream.synchronize()
        return result

    connector.to_gpu, connector.from_gpu = to_gpu, from_gpu


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


# In the order in which they are applied: the wait is around whatever saves.
REPAIRS: dict[str, Callable[[Any], None]] = {"packed-kv": move_packed_rows, "waited-saves": wait_after_saves}
