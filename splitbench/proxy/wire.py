# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 on the wire: heads, error bodies and the framing of a streamed answer. No input or output here."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import orjson

Header = tuple[bytes, bytes]

# Headers that describe one hop, or that the relay sets itself; they never pass through (RFC 9110, 7.6.1).
HOP_HEADERS = frozenset(
    [
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"upgrade", b"x-request-id"),
    ]
)
# What an engine needs of the client's head. Nothing else goes on, and none of it is ever logged.
FORWARDED_HEADERS = frozenset(
    (b"authorization", b"accept", b"traceparent", b"tracestate", b"x-data-parallel-rank")
)

SMALL_READ_BYTES = 4096
MAX_CHUNK_HEAD_BYTES = 4096
MAX_CHUNK_BYTES = 64 * 2**20

_REASONS = {status.value: status.phrase for status in HTTPStatus}


class RefusalError(Exception):
    """The client's request cannot be served as asked; `status` and the message go back to the client."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class EngineError(Exception):
    """An engine did not answer as it must; `status` (502 or 504) is what the client gets before the first
    byte.

    `untouched`: the engine cannot have seen the request, so another engine may be tried. `unanswered`: the
    connection closed before any byte of an answer, which on a kept connection only means that the engine had
    closed it.
    """

    def __init__(
        self, status: int, message: str, *, untouched: bool = False, unanswered: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.untouched = untouched
        self.unanswered = unanswered


class FramingError(ValueError):
    """Bytes that are not a chunked body."""


def error_object(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The OpenAI error object, as vLLM writes it."""
    phrase = _REASONS.get(status, "Error")
    kind = phrase.title().replace(" ", "").replace("-", "")
    if not kind.endswith("Error"):
        kind += "Error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def status_line(status: int) -> bytes:
    """`HTTP/1.1 404 Not Found` with its line end."""
    return b"HTTP/1.1 %d %s\r\n" % (status, _REASONS.get(status, "Unknown").encode())


def simple_answer(
    status: int, body: bytes, content_type: bytes, *, request_id: str | None = None, close: bool = False
) -> bytes:
    """A complete answer with a known length."""
    lines = [status_line(status), b"content-type: ", content_type, b"\r\ncontent-length: %d\r\n" % len(body)]
    if request_id is not None:
        lines.append(b"x-request-id: %s\r\n" % request_id.encode())
    if close:
        lines.append(b"connection: close\r\n")
    lines += (b"\r\n", body)
    return b"".join(lines)


def relayed_head(status: int, headers: Iterable[Header], request_id: str, close: bool) -> bytes:
    """An engine's head for the client: same status and headers, less those that describe the engine's
    connection.
    """
    lines = [status_line(status)]
    lines += [b"%s: %s\r\n" % (name, value) for name, value in headers if name.lower() not in HOP_HEADERS]
    lines.append(b"x-request-id: %s\r\n" % request_id.encode())
    lines.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    return b"".join(lines)


def request_head(
    method: bytes,
    target: bytes,
    authority: str,
    length: int,
    request_id: str | None,
    headers: Iterable[Header],
) -> bytes:
    """Head of a request to an engine; `headers` are the client's forwarded ones."""
    lines = [b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (method, target, authority.encode())]
    if method == b"POST":
        lines.append(b"content-type: application/json\r\ncontent-length: %d\r\n" % length)
    if request_id is not None:
        lines.append(b"x-request-id: %s\r\n" % request_id.encode())
    lines += [b"%s: %s\r\n" % header for header in headers]
    lines.append(b"\r\n")
    return b"".join(lines)


def chunk(payload: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def payload_of(whole: bytes) -> bytes:
    """The payload of whole chunks, as `WholeChunks.feed` gives them (the last chunk included or not)."""
    parts = []
    start, size = 0, len(whole)
    while start < size:
        line_end = whole.index(b"\r\n", start)
        length = int(whole[start:line_end].partition(b";")[0], 16)
        if length == 0:
            break
        parts.append(whole[line_end + 2 : line_end + 2 + length])
        start = line_end + 4 + length
    return parts[0] if len(parts) == 1 else b"".join(parts)


def event(value: Any) -> bytes:
    """One SSE event that carries JSON."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


LAST_CHUNK = b"0\r\n\r\n"
DONE_EVENT = b"data: [DONE]\n\n"


def _heads_by_size() -> list[bytes]:
    heads = [b"\xff"] * SMALL_READ_BYTES
    for length in range(1, SMALL_READ_BYTES):
        head = b"%x\r\n" % length
        size = len(head) + length + 2
        if size < SMALL_READ_BYTES:
            heads[size] = head
    return heads


# By the size of a read: how it begins if it is exactly one chunk. Tells the common case in one comparison.
ONE_CHUNK_HEADS = _heads_by_size()


class WholeChunks:
    """Cut a chunked body at chunk ends, leaving the bytes as they are.

    The relay passes only whole chunks on, so that it can still speak for itself (an error event) when the
    engine dies in the middle of one. `done` turns true with the last chunk; `rest` then holds bytes beyond
    the body, which an engine must not send.
    """

    __slots__ = ("_held", "_need", "done", "rest")

    def __init__(self) -> None:
        self._held = bytearray()
        self._need = 0
        self.done = False
        self.rest = b""

    @property
    def between(self) -> bool:
        """Whether a chunk's head comes next."""
        return not self._held and not self.done

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they arrived; give those that end with a chunk (possibly none).

        Raises:
            FramingError: not a chunked body, or a chunk beyond MAX_CHUNK_BYTES.
        """
        if self._held:
            self._held += data
            if len(self._held) < self._need:
                return b""
            data = bytes(self._held)
            self._held.clear()
        self._need = 0
        start, size = 0, len(data)
        while start < size:
            line_end = data.find(b"\r\n", start, start + MAX_CHUNK_HEAD_BYTES)
            if line_end < 0:
                if size - start >= MAX_CHUNK_HEAD_BYTES:
                    raise FramingError("chunk head without an end")
                break
            try:
                length = int(data[start:line_end], 16)
            except ValueError:
                length = _length_beside_extension(data[start:line_end])
            if length > 0:
                end = line_end + 4 + length
                if end > size:
                    if length > MAX_CHUNK_BYTES:
                        raise FramingError(f"chunk of {length} bytes")
                    self._need = end - start
                    break
                if data[end - 2 : end] != b"\r\n":
                    raise FramingError("chunk longer than it says")
                start = end
            elif length == 0:
                end = _trailer_end(data, line_end)
                if end < 0:
                    if size - line_end >= MAX_CHUNK_HEAD_BYTES:
                        raise FramingError("trailer without an end")
                    break
                self.done = True
                self.rest = data[end:]
                return data[:end]
            else:
                raise FramingError("negative chunk length")
        if start == size:
            return data
        self._held += data[start:]
        return data[:start]


def _length_beside_extension(head: bytes) -> int:
    digits, _, _ = head.partition(b";")
    try:
        return int(digits, 16)
    except ValueError:
        raise FramingError("chunk length is not hexadecimal") from None


def _trailer_end(data: bytes, line_end: int) -> int:
    """End of the trailer section that follows the last chunk's head at `line_end`; -1 while it is
    incomplete.
    """
    if data.startswith(b"\r\n", line_end + 2):
        return line_end + 4
    end = data.find(b"\r\n\r\n", line_end)
    return end + 4 if end >= 0 else -1
