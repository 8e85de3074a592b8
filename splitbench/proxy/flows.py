# SPDX-License-Identifier: Apache-2.0
"""How a completion travels in each mode: replicas, and prefill then decode over NixlConnector."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

from splitbench.proxy.bodies import (
    NIXL_PREFILL_PARAMS,
    prefill_body,
    read_body,
    refuse_for_pd,
    with_kv_params,
)
from splitbench.proxy.call import Background, Call, kv_params_of
from splitbench.proxy.engines import Engine, fetch
from splitbench.proxy.policy import Rotation
from splitbench.proxy.wire import EngineError


class Flow(ABC):
    """What a mode does with a completion."""

    @abstractmethod
    async def serve(self, call: Call) -> None:
        """Answer the client.

        Raises:
            RefusalError: the request cannot be answered right in this mode.
            EngineError: an engine failed before the first byte.
        """

    async def start(self) -> None:  # noqa: B027 (most modes have nothing to start)
        """Open what the mode listens on."""

    async def stop(self) -> None:  # noqa: B027
        """Close it."""


class ReplicaFlow(Flow):
    """Whole replicas: the request goes on as it came."""

    def __init__(self, replicas: Rotation) -> None:
        self.replicas = replicas

    async def serve(self, call: Call) -> None:
        await call.relay(self.replicas.order(), call.request.body)


class NixlFlow(Flow):
    """Prefill hands out where its KV lies; the decoder pulls it and makes every token."""

    def __init__(self, prefillers: Rotation, decoders: Rotation, background: Background) -> None:
        self.prefillers = prefillers
        self.decoders = decoders
        self.background = background

    async def serve(self, call: Call) -> None:
        fields = read_body(call.request.body)
        refuse_for_pd(fields)
        prefill = prefill_body(fields, NIXL_PREFILL_PARAMS)
        reply = await call.prefill(self.prefillers.order(), prefill)
        if reply.status != 200:
            call.pass_on(reply)
            return
        params = kv_params_of(reply.body)
        call.record.kv_moved = params is not None
        decoders = self.decoders.order()
        if params is None:
            call.metrics.kv_not_moved += 1
            await call.relay(decoders, call.request.body)
            return
        call.reach("kv_ready")
        release_body = with_kv_params(prefill_body(fields, None), params)
        try:
            relay = await call.relay(decoders, with_kv_params(call.request.body, params))
        except EngineError as error:
            if not call.delivered or error.status == 502:
                self.background.start(release(call, decoders, release_body))
            raise
        except asyncio.CancelledError:
            # A decoder that has the request frees both sides itself when its connection closes.
            if not call.delivered:
                self.background.start(release(call, decoders, release_body))
            raise
        if relay.status != 200:
            self.background.start(release(call, decoders, release_body))


async def release(call: Call, decoders: Sequence[Engine], body: bytes) -> None:
    """Let a decoder fetch and drop the KV of a request that nobody waits for.

    Both sides keep KV until a decoder has read it or a lease of minutes runs out; one discarded token frees
    it now.
    """
    request = call.engine_request(body, suffix="-release")
    result = "failed"
    for engine in decoders:
        with contextlib.suppress(EngineError):
            reply = await fetch(engine, request, call.limits.connect_s, call.limits.kv_s)
            if reply.status == 200:
                result = "freed"
                break
    call.metrics.releases[result] += 1
