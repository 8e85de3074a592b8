# SPDX-License-Identifier: Apache-2.0
"""One request on its way through the proxy, and the steps that every mode is made of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from splitbench.proxy.bodies import JsonObject
from splitbench.proxy.client import ClientConnection, Request
from splitbench.proxy.engines import Engine, EngineRequest, Exchange, Fetch, content_type
from splitbench.proxy.observe import Metrics, RequestRecord
from splitbench.proxy.options import Limits
from splitbench.proxy.relay import Relay
from splitbench.proxy.wire import EngineError

ExchangeT = TypeVar("ExchangeT", bound=Exchange)


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
    """One client request and what it shares with the proxy."""

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
        self.chat = request.path == b"/v1/chat/completions"
        # Records of the answers within a request that holds several.
        self.part_records: list[RequestRecord] = []

    def engine_request(self, body: bytes, request_id: str, target: bytes | None = None) -> EngineRequest:
        """A request to an engine on behalf of the client."""
        request = self.request
        return EngineRequest(b"POST", target or request.target, request_id, request.forwarded, body)

    def pass_on(self, reply: Fetch) -> None:
        """Answer the client with an engine's refusal, as the engine wrote it."""
        self.record.status = reply.status
        kind = content_type(reply.headers) or b"application/json"
        self.client.answer(reply.status, reply.body, kind, self.request, self.record.id)


class Part:
    """One prompt and one answer to it: the whole request, or one of several answers that it asks for."""

    def __init__(self, call: Call, fields: JsonObject, index: int | None = None) -> None:
        self.call = call
        self.fields = fields
        self.record = call.record
        if index is not None:
            self.record = call.record.part_of(index)
            call.part_records.append(self.record)
        self.index = index or 0
        self.decoders: Sequence[Engine] = ()
        self.kv_params: bytes | None = None
        self.prefill_delivered = False
        self.prefilled = False
        self.decode_delivered = False
        self.kept = False

    @property
    def id(self) -> str:
        """Unique over all runs of all proxies."""
        return self.record.id

    def reach(self, stage: str, moment_s: float | None = None) -> None:
        """Note that a stage has been reached (monotonic clock; uvloop's own moves in milliseconds)."""
        self.record.stages[stage] = time.monotonic() if moment_s is None else moment_s

    async def prefill(self, engines: Sequence[Engine], body: bytes) -> Fetch:
        """Send the prefill to the first engine that takes it, and give the reply.

        Raises:
            EngineError: no engine took it, or the reply did not come in time.
        """
        request = self.call.engine_request(body, self.id)
        limits = self.call.limits
        for position, engine in enumerate(engines):
            exchange = Fetch(engine)
            self.record.prefiller = engine.name
            self.reach("prefill_sent")
            try:
                await exchange.run(request, limits.connect_s, limits.prefill_s)
            except EngineError as error:
                if error.untouched and position + 1 < len(engines):
                    continue
                raise
            finally:
                self.prefill_delivered = exchange.sent_s > 0
            self.reach("prefill_answered")
            return exchange
        raise EngineError(502, "no prefill engine")

    async def decode(
        self, make: Callable[[Engine], ExchangeT], body: bytes, target: bytes | None = None
    ) -> ExchangeT:
        """Have the first decoder that takes the request answer it, in an exchange of the caller's making.

        Raises:
            EngineError: before the first byte or after it (`client.started` tells).
        """
        call = self.call
        request = call.engine_request(body, self.id, target)
        for position, engine in enumerate(self.decoders):
            exchange = make(engine)
            self.record.decoder = engine.name
            self.reach("decode_sent")
            if isinstance(exchange, Relay):
                call.client.relays.append(exchange)
            try:
                await exchange.run(request, call.limits.connect_s, call.limits.answer_s)
            except EngineError as error:
                if error.untouched and position + 1 < len(self.decoders):
                    continue
                raise
            finally:
                self.decode_delivered = exchange.sent_s > 0
                if isinstance(exchange, Relay):
                    call.client.relays.remove(exchange)
                    self._take_times(exchange)
            return exchange
        raise EngineError(502, "no decode engine")

    def _take_times(self, relay: Relay) -> None:
        self.call.metrics.reads += relay.reads
        if relay.first_byte_s:
            self.record.status = relay.status
            self.reach("decode_first_byte", relay.first_byte_s)
            self.record.stages.setdefault("first_byte", relay.first_byte_s)
            self.reach("last_byte")

    async def relay(self, body: bytes) -> Relay:
        """Pass a decoder's answer through to the client, untouched.

        A failure after the first byte ends the client's stream with an error event, and is in the record.

        Raises:
            EngineError: before the first byte.
        """
        call = self.call
        close = not call.request.keep_alive
        relays: list[Relay] = []

        def make(engine: Engine) -> Relay:
            relays.append(Relay(engine, call.client, self.id, call.limits.stall_s, close))
            return relays[-1]

        try:
            relay = await self.decode(make, body)
            # An answer that ends with its connection has to end the client's, too.
            call.request.keep_alive = call.request.keep_alive and not relay.close
            return relay
        except EngineError as error:
            if not call.client.started:
                raise
            self.record.error = str(error)
            relays[-1].break_off(error)
            return relays[-1]


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
