# SPDX-License-Identifier: Apache-2.0
"""Streams that cannot pass as bytes: their SSE events are cut out, looked at, and sent on, changed where
needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import orjson

from splitbench.proxy.engines import Engine, content_type
from splitbench.proxy.relay import Client, Relay
from splitbench.proxy.wire import (
    ONE_CHUNK_HEADS,
    SMALL_READ_BYTES,
    EngineError,
    WholeChunks,
    chunk,
    payload_of,
)

MAX_EVENT_BYTES = 64 * 2**20
MAX_REFUSAL_BYTES = 2**20


class Rewriter(Protocol):
    """Gives the bytes to send for each complete event (possibly none).

    While `quick` is true, a chunk that is one event without usage needs `patch` alone (same length).
    """

    quick: bool

    def __call__(self, data: bytes) -> bytes:
        """Rewrite one event."""

    def patch(self, data: bytes) -> bytes:
        """Mend a chunk without looking into it."""


class EventSplitter:
    """Cut a byte stream after each SSE event (a blank line), wherever the reads fell.

    The events, joined, are the stream; `rest` is what has no end yet.
    """

    __slots__ = ("_searched", "rest")

    def __init__(self) -> None:
        self.rest = b""
        self._searched = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Complete events, each with its blank line."""
        data = self.rest + data
        events = []
        start, search = 0, self._searched
        while True:
            end = data.find(b"\n\n", search)
            other = data.find(b"\n\r\n", search, end + 2 if end >= 0 else len(data))
            if other >= 0:
                end = other + 3
            elif end >= 0:
                end += 2
            else:
                break
            events.append(data[start:end])
            start = search = end
        self.rest = data[start:]
        # The blank line may be cut in the middle: look at the last two bytes again.
        self._searched = max(0, len(self.rest) - 2)
        return events


class EventRelay(Relay):
    """Relay of one engine's event stream into an answer that the proxy has begun or will begin.

    The head of the engine's answer never reaches the client (`begin` writes ours); a refusal becomes an
    `EngineError` with the engine's words.
    """

    def __init__(
        self,
        engine: Engine,
        client: Client,
        request_id: str,
        stall_s: float,
        rewriter: Rewriter,
        begin: Callable[[], None],
    ) -> None:
        super().__init__(engine, client, request_id, stall_s, close=False)
        self.rewriter = rewriter
        self._begin = begin
        self._splitter = EventSplitter()
        self._refusal = bytearray()
        self._streams = False

    def _with_head(self, data: bytes) -> bytes:
        """The first bytes of the body: begin the answer, or turn to collecting a refusal."""
        self._streams = self.status == 200 and content_type(self.headers) == b"text/event-stream"
        if self._streams:
            super()._with_head(b"")
            self._begin()
        self._head_out = b""
        return data

    def data_received(self, data: bytes) -> None:
        # As in `Relay`, for a chunk that is one event without usage. Quotes within JSON strings are escaped,
        # so that the key is a real one.
        if (
            self._passing
            and (size := len(data)) < SMALL_READ_BYTES
            and data.startswith(ONE_CHUNK_HEADS[size])
            and data.find(b"\n\n") == size - 4
            and data.endswith(b"\r\n")
            and b'"prompt_tokens"' not in data
        ):
            self.reads += 1
            self._tail = data
            self._write(self.rewriter.patch(data))
        else:
            self._take(data)

    def _may_pass(self, chunks: WholeChunks) -> bool:
        return chunks.between and self._streams and self.rewriter.quick and not self._splitter.rest

    def _write_whole(self, whole: bytes, chunks: WholeChunks) -> None:
        if self._head_out:
            self._with_head(b"")
        self._take_body(payload_of(whole))

    def _write_other(self, data: bytes) -> None:
        if self._head_out:
            self._with_head(b"")
        self._take_body(data)

    def _take_body(self, payload: bytes) -> None:
        if not self._streams:
            self._refusal += payload[: MAX_REFUSAL_BYTES - len(self._refusal)]
            return
        out = b""
        for event in self._splitter.feed(payload):
            try:
                out += self.rewriter(event)
            except EngineError as error:
                self.fail(error)
                break
        if out:
            self._write(chunk(out))
        if len(self._splitter.rest) > MAX_EVENT_BYTES:
            self.fail(
                EngineError(502, f"{self.engine.name} sent an event of more than {MAX_EVENT_BYTES} bytes")
            )

    def finish(self) -> None:
        if not self._streams:
            self.fail(
                EngineError(502, f"{self.engine.name}: {refusal_text(self.status, bytes(self._refusal))}")
            )
        elif self._splitter.rest:
            self.fail(EngineError(502, f"{self.engine.name} ended its stream within an event"))
        else:
            super().finish()


def refusal_text(status: int, body: bytes) -> str:
    """An engine's refusal in one line: its error message where it has one."""
    try:
        value = orjson.loads(body)
        message = value.get("error", value).get("message")
    except (orjson.JSONDecodeError, AttributeError):
        message = None
    return f"status {status}" if not message else f"status {status}: {message}"
