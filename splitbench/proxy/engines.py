# SPDX-License-Identifier: Apache-2.0
"""Connections to engines: a pool per engine, and exchanges of one request and one answer.

An exchange is itself the asyncio protocol of its connection while it lasts, so that a received chunk costs
one Python call and no dispatch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import httptools

from splitbench.proxy.options import EngineAddress
from splitbench.proxy.wire import EngineError, Header, request_head

# Engines serve HTTP with uvicorn, which closes a connection that was idle for 5 s. A younger one is safe to
# reuse.
REUSE_WITHIN_S = 4.0
MAX_REPLY_BYTES = 256 * 2**20
MAX_HEAD_BYTES = 64 * 1024


class Engine:
    """One engine: its address, its idle connections, and what the policy wants to know."""

    def __init__(self, address: EngineAddress, role: str) -> None:
        self.address = address
        self.role = role
        self.name = address.name
        self.in_flight = 0
        self.requests = 0
        self.failures = 0
        self._idle: list[IdleConnection] = []
        self._spare: asyncio.Task[None] | None = None

    async def connection(self, limit_s: float) -> tuple[asyncio.Transport, bool]:
        """A transport to the engine and whether it was used before.

        Raises:
            EngineError: nobody listens, or no connection within `limit_s`.
        """
        loop = asyncio.get_running_loop()
        while self._idle:
            idle = self._idle.pop()
            if not idle.transport.is_closing():
                if loop.time() - idle.since_s < REUSE_WITHIN_S:
                    self._keep_spare(limit_s)
                    return idle.transport, True
                idle.transport.abort()
        try:
            transport = await self._connect(limit_s)
        except EngineError:
            self.failures += 1
            raise
        self._keep_spare(limit_s)
        return transport, False

    async def _connect(self, limit_s: float) -> asyncio.Transport:
        try:
            async with asyncio.timeout(limit_s):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    asyncio.Protocol, self.address.host, self.address.port
                )
        except TimeoutError:
            raise EngineError(
                504, f"{self.name} took no connection in {limit_s:g} s", untouched=True
            ) from None
        except OSError as error:
            reason = error.strerror or "no connection"
            raise EngineError(502, f"{self.role} engine {self.name}: {reason}", untouched=True) from None
        return transport

    def _keep_spare(self, limit_s: float) -> None:
        """Connect ahead where no connection is idle: a handshake within a request would count as its TTFT."""
        if not self._idle and (self._spare is None or self._spare.done()):
            self._spare = asyncio.get_running_loop().create_task(self._open_spare(limit_s))

    async def _open_spare(self, limit_s: float) -> None:
        with contextlib.suppress(EngineError):  # the next request finds out for itself
            self.give_back(await self._connect(limit_s))

    def give_back(self, transport: asyncio.Transport) -> None:
        """Keep a connection whose exchange ended cleanly."""
        idle = IdleConnection(self, transport, asyncio.get_running_loop().time())
        transport.set_protocol(idle)
        self._idle.append(idle)

    def forget(self, idle: IdleConnection) -> None:
        """Drop a connection that the engine closed."""
        with contextlib.suppress(ValueError):
            self._idle.remove(idle)

    def close(self) -> None:
        """Close the idle connections."""
        if self._spare is not None:
            self._spare.cancel()
        for idle in self._idle:
            idle.transport.abort()
        self._idle.clear()


class IdleConnection(asyncio.Protocol):
    """A kept connection; whatever happens to it ends its use."""

    def __init__(self, engine: Engine, transport: asyncio.Transport, since_s: float) -> None:
        self.engine = engine
        self.transport = transport
        self.since_s = since_s

    def data_received(self, data: bytes) -> None:
        self.engine.forget(self)
        self.transport.abort()

    def eof_received(self) -> bool:
        self.engine.forget(self)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.forget(self)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as the engine gets it."""

    method: bytes
    target: bytes
    request_id: str | None
    headers: Sequence[Header]
    body: bytes = b""

    def bytes_for(self, engine: Engine) -> bytes:
        """Head and body in one piece."""
        head = request_head(
            self.method, self.target, engine.name, len(self.body), self.request_id, self.headers
        )
        return head + self.body


class Exchange(asyncio.Protocol):
    """One request and its answer on one connection.

    Subclasses take the answer in `data_received`, and call `finish` or `fail` once.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.status = 0
        self.headers: list[Header] = []
        self.transport: asyncio.Transport
        self.keep_alive = True
        self.paused = False
        self.heard_anything = False
        self.sent_s = 0.0
        self._heard_s = 0.0
        self._limit_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._done: asyncio.Future[None] = self._loop.create_future()

    async def run(self, request: EngineRequest, connect_s: float, answer_s: float) -> None:
        """Send the request and wait until the answer has been taken.

        A kept connection that closes before the first byte of an answer is replaced once: the engine had
        closed it. Cancelling aborts the connection, which makes a vLLM engine drop the request and free its
        KV.

        Raises:
            EngineError: no answer, a broken one, or a limit reached.
        """
        payload = request.bytes_for(self.engine)
        transport, reused = await self.engine.connection(connect_s)
        self.engine.in_flight += 1
        self.engine.requests += 1
        try:
            try:
                await self._run_on(transport, payload, answer_s)
            except EngineError as failure:
                if not (reused and failure.unanswered):
                    raise
                self._done = self._loop.create_future()
                self.engine.close()
                transport, _ = await self.engine.connection(connect_s)
                await self._run_on(transport, payload, answer_s)
        except EngineError:
            self.engine.failures += 1
            raise
        finally:
            self.engine.in_flight -= 1

    async def _run_on(self, transport: asyncio.Transport, payload: bytes, answer_s: float) -> None:
        self.transport = transport
        transport.set_protocol(self)
        if transport.is_closing():
            raise EngineError(502, f"{self.engine.name} closed the connection", unanswered=True)
        self.sent_s = self._heard_s = self._clock()
        self._limit_s = answer_s
        self._timer = self._loop.call_later(answer_s, self._on_timer)
        transport.write(payload)
        clean = False
        try:
            await self._done
            clean = True
        finally:
            self._timer.cancel()
            if clean and self.keep_alive and not transport.is_closing():
                if self.paused:
                    self.paused = False
                    transport.resume_reading()
                self.engine.give_back(transport)
            else:
                transport.abort()

    def _on_timer(self) -> None:
        silent_s = self._clock() - self._heard_s
        # A timer may fire a clock tick early; a millisecond is nothing against these limits.
        if silent_s >= self._limit_s - 0.001:
            self.fail(EngineError(504, self.silence()))
        else:
            self._timer = self._loop.call_later(self.look_again_s(silent_s), self._on_timer)

    def look_again_s(self, silent_s: float) -> float:
        """When to look at the silence again."""
        return self._limit_s - silent_s

    def silence(self) -> str:
        """What to say when a limit is reached."""
        return f"{self.engine.role} engine {self.engine.name} sent nothing for {self._limit_s:g} s"

    def expect_within(self, limit_s: float) -> None:
        """From now on, silence for `limit_s` is a failure."""
        self._limit_s = limit_s
        self._heard_s = self._clock()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_later(self.look_again_s(0.0), self._on_timer)

    def finish(self) -> None:
        """The answer is complete."""
        if not self._done.done():
            self._done.set_result(None)

    def fail(self, failure: EngineError) -> None:
        """The answer is broken."""
        if not self._done.done():
            self._done.set_exception(failure)

    def closed_early(self) -> None:
        """The engine closed the connection before its answer ended."""
        self.fail(
            EngineError(
                502,
                f"{self.engine.role} engine {self.engine.name} closed the connection before its answer ended",
                unanswered=not self.heard_anything,
            )
        )

    def eof_received(self) -> bool:
        self.closed_early()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed_early()

    # httptools callbacks for the answer's head

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


class Fetch(Exchange):
    """An answer taken whole: prefill replies, health, models."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.body = b""
        self._parts: list[bytes] = []
        self._size = 0
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self.heard_anything = True
        self._heard_s = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(EngineError(502, f"{self.engine.name} did not answer in HTTP: {error}"))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_REPLY_BYTES:
            self.fail(EngineError(502, f"{self.engine.name} answered with more than {MAX_REPLY_BYTES} bytes"))
            return
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self.body = b"".join(self._parts)
        self.finish()

    def eof_received(self) -> bool:
        if self._ends_with_connection():
            self.keep_alive = False
            self.on_message_complete()
            return False
        return super().eof_received()

    def _ends_with_connection(self) -> bool:
        names = {name for name, _ in self.headers}
        return self.status > 0 and b"content-length" not in names and b"transfer-encoding" not in names


async def fetch(engine: Engine, request: EngineRequest, connect_s: float, answer_s: float) -> Fetch:
    """Do a request whose answer is taken whole.

    Raises:
        EngineError: see `Exchange.run`.
    """
    exchange = Fetch(engine)
    await exchange.run(request, connect_s, answer_s)
    return exchange


def content_type(headers: Sequence[Header]) -> bytes:
    """The content type, lower case, without parameters."""
    for name, value in headers:
        if name == b"content-type":
            return value.split(b";")[0].strip().lower()
    return b""
