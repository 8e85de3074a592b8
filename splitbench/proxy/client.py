# SPDX-License-Identifier: Apache-2.0
"""A client's connection: requests come in whole, one at a time; answers go out as bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import orjson

from splitbench.proxy.relay import Relay
from splitbench.proxy.wire import FORWARDED_HEADERS, Header, error_object, simple_answer

MAX_HEADER_BYTES = 64 * 1024
MAX_WAITING = 32
CUT_GRACE_S = 5.0


@dataclass(slots=True)
class Request:
    """One request of a client."""

    method: bytes
    path: bytes
    query: bytes = b""
    client_id: str | None = None
    forwarded: list[Header] = field(default_factory=list)
    body: bytes = b""
    http_1_0: bool = False
    keep_alive: bool = True

    @property
    def target(self) -> bytes:
        """Path and query, as the client wrote them."""
        return self.path + b"?" + self.query if self.query else self.path


Handler = Callable[["ClientConnection", Request], Coroutine[Any, Any, None]]


class ClientConnection(asyncio.Protocol):
    """One connection of a client. A request waits until the one before it has been answered."""

    transport: asyncio.Transport
    write: Callable[[bytes], None]

    def __init__(
        self, handler: Handler, open_connections: set[ClientConnection], max_body_bytes: int
    ) -> None:
        self.started = False
        self.write_paused = False
        self.relays: list[Relay] = []
        self.task: asyncio.Task[None] | None = None
        self._handler = handler
        self._open = open_connections
        self._max_body_bytes = max_body_bytes
        self._waiting: deque[Request] = deque()
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._head_bytes = 0
        self._headers: list[Header] = []
        self._parts: list[bytes] = []
        self._size = 0
        self._closing = False

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        self.write = self.transport.write
        self._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        self._closing = True
        self._waiting.clear()
        if self.task is not None:
            self.task.cancel()

    def eof_received(self) -> bool:
        # A client that stops sending has gone: both engines must stop working for it.
        return False

    def pause_writing(self) -> None:
        self.write_paused = True
        for relay in self.relays:
            relay.pause()

    def resume_writing(self) -> None:
        self.write_paused = False
        for relay in self.relays:
            relay.resume()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # a server may ignore the wish; the request is served, and the connection closed
        except httptools.HttpParserError as error:
            if not self._closing:  # else a callback refused the request
                self.refuse(400, f"not an HTTP request: {error}")

    # httptools

    def on_message_begin(self) -> None:
        self._url = b""
        self._head_bytes = 0
        self._headers = []
        self._parts = []
        self._size = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))
        self._count_head(len(name) + len(value))

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEADER_BYTES:
            self.refuse(431, f"more than {MAX_HEADER_BYTES} bytes of headers")

    def on_headers_complete(self) -> None:
        fields = dict(self._headers)
        length = fields.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            self._refuse_size()
        elif (
            fields.get(b"expect", b"").lower() == b"100-continue" and self.task is None and not self._closing
        ):
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._max_body_bytes:
            self._refuse_size()
        elif not self._closing:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._closing:
            return
        try:
            url = httptools.parse_url(self._url)
        except httptools.HttpParserError:
            self.refuse(400, "not a request target")
            return
        fields = dict(self._headers)
        client_id = fields.get(b"x-request-id", b"").decode("ascii", "replace").strip()
        request = Request(
            method=self._parser.get_method(),
            path=url.path or b"/",
            query=url.query or b"",
            client_id=client_id or None,
            forwarded=[header for header in self._headers if header[0] in FORWARDED_HEADERS],
            body=b"".join(self._parts),
            http_1_0=self._parser.get_http_version() == "1.0",
            keep_alive=self._parser.should_keep_alive() and not self._parser.should_upgrade(),
        )
        self._parts = []
        if self.task is None:
            self._start(request)
        elif len(self._waiting) < MAX_WAITING:
            self._waiting.append(request)
        else:
            self._closing = True
            self.transport.abort()

    # answers

    def answer(
        self, status: int, body: bytes, content_type: bytes, request: Request, request_id: str | None
    ) -> None:
        """Send a complete answer."""
        self.started = True
        close = not request.keep_alive
        self.write(simple_answer(status, body, content_type, request_id=request_id, close=close))

    def refuse(self, status: int, message: str) -> None:
        """Answer what is not a request that can be served, and close."""
        if self._closing:
            return
        self._closing = True
        if self.task is None:
            body = orjson.dumps(error_object(status, message))
            self.write(simple_answer(status, body, b"application/json", close=True))
            self.transport.close()
        else:
            self.transport.abort()

    def cut(self) -> None:
        """End the connection without ending the answer."""
        self._closing = True
        self.transport.close()
        # A client that does not read would keep the last bytes, and so the connection, for ever.
        asyncio.get_running_loop().call_later(CUT_GRACE_S, self.transport.abort)

    def _refuse_size(self) -> None:
        self.refuse(413, f"the body is larger than {self._max_body_bytes} bytes")

    # one request after the other

    def _start(self, request: Request) -> None:
        self.started = False
        self.task = asyncio.get_running_loop().create_task(self._serve(request))

    async def _serve(self, request: Request) -> None:
        try:
            await self._handler(self, request)
        finally:
            self.task = None
            if not self._closing:
                if not request.keep_alive:
                    self._closing = True
                    self.transport.close()
                elif self._waiting:
                    self._start(self._waiting.popleft())
