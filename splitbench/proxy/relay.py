# SPDX-License-Identifier: Apache-2.0
"""The pass-through relay: an engine's answer reaches the client byte for byte, and never half a chunk of
it.
"""

from __future__ import annotations

import time
from typing import Protocol

import httptools

from splitbench.proxy.engines import MAX_HEAD_BYTES, Engine, Exchange, content_type
from splitbench.proxy.wire import (
    ONE_CHUNK_HEADS,
    SMALL_READ_BYTES,
    EngineError,
    FramingError,
    WholeChunks,
    chunk,
    error_object,
    event,
    payload_of,
    relayed_head,
)


class Client(Protocol):
    """What the relay needs of the client's connection."""

    started: bool
    write_paused: bool

    def write(self, data: bytes) -> None:
        """Send bytes of the answer."""

    def cut(self) -> None:
        """End the connection without ending the answer, so that nobody takes it for complete."""


class Relay(Exchange):
    """Pass one engine's answer to the client, head and body, without looking into the body.

    The head waits for the first byte of the body: until then the engine may still fail, and the client still
    gets a proper status. `stall_s` is the longest silence within the answer.
    """

    def __init__(self, engine: Engine, client: Client, request_id: str, stall_s: float, close: bool) -> None:
        super().__init__(engine)
        self.client = client
        self.request_id = request_id
        self.stall_s = stall_s
        self.close = close
        self.reads = 0
        self.first_byte_s = 0.0
        self._write = client.write
        self._head = bytearray()
        self._head_out = b""
        self._chunks: WholeChunks | None = None
        self._left = -1
        self._until_close = False
        self._passing = False
        self._reads_seen = 0
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        # Nearly every read is one chunk: that case is decided in a microsecond, here and without a call.
        if (
            self._passing
            and (size := len(data)) < SMALL_READ_BYTES
            and data.startswith(ONE_CHUNK_HEADS[size])
            and data.endswith(b"\r\n")
        ):
            self.reads += 1
            self._tail = data
            self._write(data)
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        """Any read."""
        chunks = self._chunks
        if chunks is None:
            self._take_other(data)
            return
        self._passing = False
        try:
            whole = chunks.feed(data)
        except FramingError as error:
            self.fail(EngineError(502, f"{self.engine.name} broke the chunked framing: {error}"))
            return
        if whole:
            self.reads += 1
            self._tail = whole
            self._write_whole(whole, chunks)
            self._passing = self._may_pass(chunks)
            if chunks.done:
                self.keep_alive = self.keep_alive and not chunks.rest
                self.finish()

    def _may_pass(self, chunks: WholeChunks) -> bool:
        """Whether a read that is one chunk needs no look at all."""
        return chunks.between

    def _write_whole(self, whole: bytes, chunks: WholeChunks) -> None:
        if self._head_out:
            whole = self._with_head(whole)
        self._write(whole)

    def _write_other(self, data: bytes) -> None:
        if self._head_out:
            data = self._with_head(data)
        self._write(data)

    def _take_other(self, data: bytes) -> None:
        """Everything but a chunked body: the head, and bodies that end by their length or with the
        connection.
        """
        if self.status == 0:
            data = self._take_head(data)
            if self.status == 0:
                return
            if self._chunks is not None:
                if data:
                    self.data_received(data)
                return
        if self._left >= 0:
            if len(data) > self._left:
                data = data[: self._left]
                self.keep_alive = False
            self._left -= len(data)
        if data:
            self.reads += 1
        if data or self._left == 0:
            self._write_other(data)
        if self._left == 0:
            self.finish()

    def _take_head(self, data: bytes) -> bytes:
        """Collect the head; give what follows it. `status` stays 0 until the head is whole."""
        self.heard_anything = True
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > MAX_HEAD_BYTES:
                self.fail(EngineError(502, f"{self.engine.name} sent a head without an end"))
            return b""
        head, rest = bytes(self._head[: end + 4]), bytes(self._head[end + 4 :])
        self._head.clear()
        parser = httptools.HttpResponseParser(self)
        try:
            parser.feed_data(head)
            status = parser.get_status_code()
        except httptools.HttpParserError as error:
            self.fail(EngineError(502, f"{self.engine.name} did not answer in HTTP: {error}"))
            return b""
        if status < 200:  # interim answers say nothing to us
            self.headers.clear()
            return self._take_head(rest) if rest else b""
        fields = dict(self.headers)
        self.keep_alive = parser.should_keep_alive()
        if b"chunked" in fields.get(b"transfer-encoding", b"").lower():
            self._chunks = WholeChunks()
        elif b"content-length" in fields:
            self._left = int(fields[b"content-length"])
        elif status in (204, 304):
            self._left = 0
        else:
            self._until_close, self.keep_alive, self.close = True, False, True
        self.status = status
        self._head_out = relayed_head(status, self.headers, self.request_id, self.close)
        return rest

    def _with_head(self, data: bytes) -> bytes:
        data, self._head_out = self._head_out + data, b""
        self.first_byte_s = time.monotonic()
        self.client.started = True
        self.expect_within(self.stall_s)
        if self.client.write_paused:
            self.pause()
        return data

    def closed_early(self) -> None:
        if self._until_close and not self._head_out:
            self.finish()
        else:
            super().closed_early()

    def silence(self) -> str:
        if self.paused:
            return f"the client took nothing for {self._limit_s:g} s"
        return super().silence()

    def expect_within(self, limit_s: float) -> None:
        self._reads_seen = self.reads
        super().expect_within(limit_s)

    def _on_timer(self) -> None:
        # Reads are only counted, which costs less than asking the time for each. With four looks within the
        # limit, silence is noticed at the latest a quarter of it late.
        if self.reads != self._reads_seen:
            self._reads_seen = self.reads
            self._heard_s = self._clock()
        super()._on_timer()

    def look_again_s(self, silent_s: float) -> float:
        return min(self._limit_s - silent_s, self._limit_s / 4)

    def pause(self) -> None:
        """The client reads slower than the engine writes."""
        if not self.paused and not self._done.done():
            self.paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """The client has caught up."""
        if self.paused:
            self.paused = False
            self._heard_s = self._clock()
            if not self._done.done():
                self.transport.resume_reading()

    def break_off(self, failure: EngineError) -> None:
        """The engine failed after the first byte: say so in the stream where it is one, and end it as
        incomplete.

        The last chunk is left out on purpose. A client that does not look for error events would otherwise
        take the stream for complete, and a benchmark would count a request that failed.
        """
        if self._chunks is not None and content_type(self.headers) == b"text/event-stream":
            # By the payload: in a chunk that is one newline, the size line's own newline stands before it.
            gap = b"" if payload_of(self._tail).endswith(b"\n\n") else b"\n\n"
            self.client.write(chunk(gap + event(error_object(failure.status, str(failure)))))
        self.client.cut()
