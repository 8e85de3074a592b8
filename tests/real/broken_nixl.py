# SPDX-License-Identifier: Apache-2.0
"""The demo's connector, with a worker that can be told to move KV badly while it reports success.

Loaded by a decode engine through `kv_connector_module_path`. How it behaves is read at every transfer from the file
that `kv_connector_extra_config` names as `manner_file`; without that file it is sound.

- `silent`: nothing is read; the prefiller is told that it was, the scheduler that the KV is there.
- `unwritten`: everything is read, into the block that nobody uses; bytes and tokens count as moved.
- `misplaced`: each block gets the KV of another block of the same prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitbench.serving import calm_nixl


class NixlConnector(calm_nixl.NixlConnector):
    """Sound until its file says otherwise."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        worker = self.connector_worker
        if worker is None:
            return
        file = Path(vllm_config.kv_transfer_config.get_from_extra_config("manner_file", ""))

        def manner() -> str:
            return file.read_text() if file.is_file() else "sound"

        _skip_reads(worker, manner)
        _turn_reads_aside(worker, manner)


def _skip_reads(worker: Any, manner: Any) -> None:
    read = worker._read_blocks_for_req

    def reading(request: str, meta: Any) -> None:
        # A first request waits for the handshake and comes again.
        if manner() == "silent" and meta.remote.engine_id in worker._remote_agents:
            worker._recving_transfers.setdefault(request, [])
            meta.local_physical_block_ids = []  # nothing to read: the prefiller is only notified
        read(request, meta)

    worker._read_blocks_for_req = reading


def _turn_reads_aside(worker: Any, manner: Any) -> None:
    make = worker.nixl_wrapper.make_prepped_xfer

    def making(operation: str, local: int, local_ids: Any, remote: int, remote_ids: Any, **more: Any) -> Any:
        if manner() == "unwritten":
            # Descriptors count blocks region by region; the first block of each is vLLM's null block.
            local_ids = local_ids - local_ids % worker.num_blocks
        if manner() == "misplaced":
            # Reversed within each region: right layer, wrong place.
            regions = len(remote_ids) // _blocks_of(remote_ids, worker.num_blocks)
            remote_ids = remote_ids.reshape(regions, -1)[:, ::-1].reshape(-1)
        return make(operation, local, local_ids, remote, remote_ids, **more)

    worker.nixl_wrapper.make_prepped_xfer = making


def _blocks_of(ids: Any, num_blocks: int) -> int:
    """Blocks of one region among descriptor ids."""
    return int((ids // num_blocks == ids[0] // num_blocks).sum())
