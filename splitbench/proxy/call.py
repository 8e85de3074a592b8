# SPDX-License-Identifier: Apache-2.0
"""One request on its way through the proxy, and the steps that every mode is made of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from splitbench.proxy.client import ClientConnection, Request
from splitbench.proxy.engines import Engine, EngineRequest, Fetch, content_type, fetch
from splitbench.proxy.observe import Metrics, RequestRecord
from splitbench.proxy.options import Limits
from splitbench.proxy.relay import Relay
from splitbench.proxy.wire import EngineError


class PrefillReply(msgspec.Struct):
    """What is read of a prefill engine's reply; the KV parameters stay bytes."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_prefill_reply = msgspec.json.Decoder(PrefillReply)


def kv_params_of(reply: bytes) -> bytes | None:
    """The KV parameters in a prefill reply as JSON bytes; None where the prefill hands nothing over.

    Raises:
        EngineError: the reply is not a JSON object.
    """
    try:
        raw = bytes(_prefill_reply.decode(reply).kv_transfer_params)
    except msgspec.DecodeError:
        raise EngineError(502, "the prefill engine's reply is not a JSON object") from None
    return None if raw == b"null" else raw


class Call:
    """One client request: its identity, its record, and what it shares with the proxy."""

    def __init__(
        self,
        client: ClientConnection,
        request: Request,
        record: RequestRecord,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self.client = client
        self.request = request
        self.record = record
        self.limits = limits
        self.metrics = metrics
        self.delivered = False
        # Not the loop's clock: uvloop's moves in milliseconds.
        self.clock = time.monotonic

    @property
    def id(self) -> str:
        """The request's id: unique over all runs of all proxies."""
        return self.record.id

    def engine_request(self, body: bytes, target: bytes | None = None, suffix: str = "") -> EngineRequest:
        """A request to an engine on behalf of the client."""
        request = self.request
        return EngineRequest(b"POST", target or request.target, self.id + suffix, request.forwarded, body)

    def reach(self, stage: str, moment_s: float | None = None) -> None:
        """Note that a stage has been reached."""
        self.record.stages[stage] = self.clock() if moment_s is None else moment_s

    async def prefill(self, engines: Sequence[Engine], body: bytes, target: bytes | None = None) -> Fetch:
        """Send the prefill to the first engine that takes it, and give the reply.

        Raises:
            EngineError: no engine took it, or the reply did not come in time.
        """
        request = self.engine_request(body, target)
        for position, engine in enumerate(engines):
            self.record.prefiller = engine.name
            self.reach("prefill_sent")
            try:
                reply = await fetch(engine, request, self.limits.connect_s, self.limits.prefill_s)
            except EngineError as failure:
                if failure.untouched and position + 1 < len(engines):
                    continue
                raise
            self.reach("prefill_answered")
            return reply
        raise EngineError(502, "no prefill engine")

    def pass_on(self, reply: Fetch) -> None:
        """Answer the client with an engine's refusal, as the engine wrote it."""
        self.record.status = reply.status
        kind = content_type(reply.headers) or b"application/json"
        self.client.answer(reply.status, reply.body, kind, self.request, self.id)

    async def relay(self, engines: Sequence[Engine], body: bytes) -> Relay:
        """Pass the answer of the first engine that takes the request through to the client.

        A failure after the first byte ends the client's stream with an error event, and is in the record.

        Raises:
            EngineError: before the first byte.
        """
        request = self.engine_request(body)
        for position, engine in enumerate(engines):
            self.record.decoder = engine.name
            relay = Relay(engine, self.client, self.id, self.limits.stall_s, not self.request.keep_alive)
            self.client.relay = relay
            self.reach("decode_sent")
            try:
                await relay.run(request, self.limits.connect_s, self.limits.answer_s)
            except EngineError as failure:
                if self.client.started:
                    self.record.error = str(failure)
                    relay.break_off(failure)
                elif failure.untouched and position + 1 < len(engines):
                    continue
                else:
                    raise
            finally:
                self.delivered = relay.sent_s > 0
                self.metrics.reads += relay.reads
                if relay.first_byte_s:
                    self.record.status = relay.status
                    self.reach("first_byte", relay.first_byte_s)
                    self.reach("last_byte")
            return relay
        raise EngineError(502, "no engine")


class Background:
    """Tasks that outlive their request: consuming KV that nobody wants any more."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it; it is cancelled when the proxy stops."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancel what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
