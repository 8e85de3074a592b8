# SPDX-License-Identifier: Apache-2.0
"""How KV gets from the prefill to the decode engine: what the prefill is told, when the decoder may start."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

from splitbench.proxy.bodies import JsonObject, prefill_body, with_kv_params
from splitbench.proxy.call import Background, Call, Part, kv_params_of
from splitbench.proxy.engines import Engine, Fetch, fetch
from splitbench.proxy.notifications import KvNotifications, KvWait
from splitbench.proxy.policy import Rotation
from splitbench.proxy.wire import EngineError

# How long KV of a prefill that was broken off may still be on its way.
STRAY_KV_S = 1.0


class Handoff(ABC):
    """One way of moving KV. The order for each part: `open`, `settle`, and `abandon` where it ends early."""

    keeps_unread = False  # whether a decoder keeps KV of a request that was cancelled before it read it

    def __init__(self, decoders: Rotation, background: Background) -> None:
        self.decoders = decoders
        self.background = background

    async def start(self) -> None:  # noqa: B027 (only LMCache listens)
        """Open what the hand-over listens on."""

    async def stop(self) -> None:  # noqa: B027
        """Close it."""

    @abstractmethod
    def open(self, part: Part) -> JsonObject | None:
        """Choose the part's decoders, best first, and give the KV parameters of its prefill."""

    @abstractmethod
    async def settle(self, part: Part, reply: Fetch) -> bytes | None:
        """Wait until the decoder may start; give the KV parameters that it gets, as JSON.

        Raises:
            EngineError: the KV did not arrive.
        """

    @abstractmethod
    def abandon(self, part: Part) -> None:
        """The part has ended before a decoder took its KV: see to it that the KV does not stay."""

    def close(self, part: Part) -> None:  # noqa: B027
        """The part has ended; called once, after all else."""


class NixlHandoff(Handoff):
    """vLLM's NixlConnector: the prefill's reply says where its KV lies, and the decoder pulls it."""

    def open(self, part: Part) -> JsonObject | None:
        part.decoders = self.decoders.order()
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    async def settle(self, part: Part, reply: Fetch) -> bytes | None:
        part.kv_params = kv_params_of(reply.body)
        part.record.kv_moved = part.kv_params is not None
        if part.kv_params is None:
            part.call.metrics.kv_not_moved += 1
        else:
            part.reach("kv_ready")
        return part.kv_params

    def abandon(self, part: Part) -> None:
        if part.kv_params is not None:
            body = with_kv_params(prefill_body(part.fields, None), part.kv_params)
            self.background.start(release(part, part.decoders, body))


class LMCacheHandoff(Handoff):
    """LMCache over NIXL: the prefill pushes its KV to the decoder that it is told, and then notifies us."""

    keeps_unread = True

    def __init__(
        self, decoders: Rotation, background: Background, notifications: KvNotifications, head: bool
    ) -> None:
        super().__init__(decoders, background)
        self.notifications = notifications
        self.head = head
        self._waits: dict[str, KvWait] = {}

    async def start(self) -> None:
        self.notifications.start()

    async def stop(self) -> None:
        self.notifications.stop()

    def open(self, part: Part) -> JsonObject | None:
        decoder = self.decoders.order()[0]
        part.decoders = [decoder]  # the KV lies there and nowhere else
        address = decoder.address
        self._waits[part.id] = self.notifications.expect(part.id, len(address.init_ports))
        return {
            "ret_first_tok": self.head,
            "disagg_spec": {
                "req_id": part.id,
                "receiver_host": address.host,
                "receiver_init_port": list(address.init_ports),
                "receiver_alloc_port": list(address.alloc_ports),
            },
        }

    async def settle(self, part: Part, reply: Fetch) -> bytes | None:
        wait = self._waits[part.id]
        metrics = part.call.metrics
        metrics.kv_waiting += 1
        try:
            await wait.within(part.call.limits.kv_s)
        finally:
            metrics.kv_waiting -= 1
        part.record.kv_moved = True
        part.reach("kv_ready", wait.arrived_s)
        return None

    def abandon(self, part: Part) -> None:
        wait = self._waits.get(part.id)
        if wait is not None and part.prefill_delivered:
            part.kept = True
            self.background.start(self._consume(part, wait))

    async def _consume(self, part: Part, wait: KvWait) -> None:
        """The decoder keeps received KV until a request has used it: use it up, when it has come.

        Where a prefill was broken off and nothing has come, the decoder is left alone: it would have to
        compute the prompt.
        """
        try:
            limit_s = part.call.limits.kv_s
            if not part.prefilled:
                limit_s = min(STRAY_KV_S, limit_s)
            if not wait.waited:
                with contextlib.suppress(EngineError):
                    await wait.within(limit_s)
            if part.prefilled or wait.arrived:
                await release(part, part.decoders, prefill_body(part.fields, None))
        finally:
            part.kept = False
            self.close(part)

    def close(self, part: Part) -> None:
        if not part.kept:
            self._waits.pop(part.id, None)
            self.notifications.forget(part.id)


class SharedCacheHandoff(Handoff):
    """LMCache's multiprocess mode: both engines read and write one cache server, which nobody has to be
    told.
    """

    def open(self, part: Part) -> JsonObject | None:
        part.decoders = self.decoders.order()
        return None

    async def settle(self, part: Part, reply: Fetch) -> bytes | None:
        part.reach("kv_ready")
        return None

    def abandon(self, part: Part) -> None:
        """The cache server forgets by itself."""


async def release(part: Part, decoders: Sequence[Engine], body: bytes) -> None:
    """Let a decoder take and drop the KV of a request that nobody waits for.

    Engines keep KV until a decoder has used it or a lease of minutes runs out; one discarded token frees it.
    """
    call: Call = part.call
    request = call.engine_request(body, request_id=f"{part.id}-release")
    result = "failed"
    for engine in decoders:
        with contextlib.suppress(EngineError):
            reply = await fetch(engine, request, call.limits.connect_s, call.limits.kv_s)
            if reply.status == 200:
                result = "freed"
                break
    call.metrics.releases[result] += 1
