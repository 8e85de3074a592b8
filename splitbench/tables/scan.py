# SPDX-License-Identifier: Apache-2.0
"""Finding the values of a JSON object in a mapped file, without building them.

A result file is one object with a few huge arrays. Locating each top-level value first, and decoding the
arrays piece by piece after, keeps memory flat whatever the file's size, reads the NaN and Infinity literals
that strict decoders refuse, and gives every error a byte.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from splitbench.errors import UserError

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,:\[\]{}\"]++")
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}"]', re.DOTALL)
_TEXTS = re.compile(rb'\[[ \t\r\n]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[ \t\r\n]*+,?[ \t\r\n]*+)*+\]', re.DOTALL)
_NESTED_END = re.compile(rb"\][ \t\r\n]*+\]")
_NUMBER_LISTS = re.compile(rb"\[[ \t\r\n]*+\[[ \t\r\n]*+[-0-9NI\]]")

_FORGET_BYTES = 8 << 20
_WINDOW_BYTES = 1 << 18

Span = tuple[int, int]
"""Byte range of a value: start and one past its end."""


class Source:
    """A mapped result file.

    Attributes:
        path: the file.
        data: its bytes.
        size: their number.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)

    def error(self, message: str, mend: str | None = None) -> UserError:
        """A UserError about this file."""
        return UserError(message, where=str(self.path), mend=mend)

    def ends_early(self, inside: str) -> UserError:
        """The error of a file that stops in the middle of a value."""
        return self.error(
            f"ends early at byte {self.size}, inside {inside}; a complete result object is expected",
            mend="run the cell again or delete the file",
        )

    def unexpected(self, at: int, expected: str) -> UserError:
        """The error of a byte that cannot be there."""
        if at >= self.size:
            return self.ends_early(expected)
        found = bytes(self.data[at : at + 12]).decode("utf-8", "backslashreplace")
        return self.error(f"byte {at}: {expected} is expected, found {found!r}")

    def sha256(self) -> str:
        """sha256 of the file, as 64 hex digits."""
        state = hashlib.sha256()
        with memoryview(self.data) as view:
            for at in range(0, self.size, _FORGET_BYTES):
                state.update(view[at : at + _FORGET_BYTES])
                self.forget(at)
        return state.hexdigest()

    def forget(self, upto: int) -> None:
        """Let the system drop pages before `upto`; they come back from the file if they are read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED, 0, upto - upto % mmap.PAGESIZE)


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Map a file for scanning.

    Raises:
        UserError: it is missing, unreadable or empty.
    """
    try:
        with path.open("rb") as handle:
            if not handle.seek(0, 2):
                raise UserError("file is empty; a result object is expected", where=str(path))
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    try:
        yield Source(path, data)
    finally:
        # A match object in a live traceback still points into the map; it closes with the last of them.
        with suppress(BufferError):
            data.close()


def skip_space(source: Source, at: int) -> int:
    """First byte at or after `at` that is no white space."""
    match = _SPACE.match(source.data, at)
    assert match is not None  # the pattern matches the empty string
    return match.end()


def scan_objects(source: Source) -> list[dict[str, Span]]:
    """Every top-level object of the file: one for plain JSON, several for JSON Lines.

    Returns:
        Per object, the span of each value by its key.

    Raises:
        UserError: the file ends early, is no JSON, or holds something else than objects.
    """
    at = 3 if source.data[:3] == b"\xef\xbb\xbf" else 0
    at = skip_space(source, at)
    if at == source.size:
        raise source.error("file is empty; a result object is expected")
    objects = []
    while at < source.size:
        if source.data[at : at + 1] != b"{":
            raise _foreign(source, at)
        spans, at = scan_object(source, at)
        objects.append(spans)
        at = skip_space(source, at)
    return objects


def _foreign(source: Source, at: int) -> UserError:
    first = bytes(source.data[at : at + 1])
    if first == b"[":
        inner = skip_space(source, at + 1)
        what = "an empty list" if source.data[inner : inner + 1] == b"]" else "a list"
        return source.error(f"a result object is expected, found {what} at byte {at}")
    return source.unexpected(at, "a result object")


def scan_object(source: Source, at: int) -> tuple[dict[str, Span], int]:
    """Spans of the values of the object that starts at `at`, and the byte after it."""
    data = source.data
    spans: dict[str, Span] = {}
    at = skip_space(source, at + 1)
    if data[at : at + 1] == b"}":
        return spans, at + 1
    while True:
        match = _STRING.match(data, at)
        if match is None:
            raise source.ends_early("a key") if data[at : at + 1] == b'"' else source.unexpected(at, "a key")
        key = decode_text(source, (at, match.end()))
        at = skip_space(source, match.end())
        if data[at : at + 1] != b":":
            raise source.unexpected(at, f"a colon after {key!r}")
        at = skip_space(source, at + 1)
        end = value_end(source, at, key)
        spans[key] = (at, end)
        at = skip_space(source, end)
        mark = data[at : at + 1]
        if mark == b"}":
            return spans, at + 1
        if mark != b",":
            raise source.unexpected(at, f"a comma or the end of the object after {key!r}")
        at = skip_space(source, at + 1)


def value_end(source: Source, at: int, key: str) -> int:
    """One past the last byte of the value that starts at `at`."""
    data = source.data
    first = data[at : at + 1]
    if first == b'"':
        match = _STRING.match(data, at)
        if match is None:
            raise source.ends_early(key)
        return match.end()
    if first in (b"[", b"{"):
        if _NUMBER_LISTS.match(data, at):
            return _number_lists_end(source, at, key)
        # A short list of texts in one match; whether its commas are right, the decoder will say.
        match = _TEXTS.match(data, at, min(at + _FORGET_BYTES, source.size))
        return match.end() if match is not None else _container_end(source, at, key)
    match = _SCALAR.match(data, at)
    if match is None:
        raise source.unexpected(at, f"a value for {key!r}")
    return match.end()


def _number_lists_end(source: Source, at: int, key: str) -> int:
    """End of a list of number lists: its first double bracket, since numbers hold no quotes and no brackets.

    A quote or brace shows that the end was passed; looking for these is much faster than for the pattern.
    """
    window = at
    while window < source.size:
        piece = source.data[window : window + _WINDOW_BYTES]
        if b'"' in piece or b"}" in piece or window + _WINDOW_BYTES >= source.size:
            # From a little before: the brackets may lie in the last bytes of the window before this one.
            match = _NESTED_END.search(source.data, max(at, window - _WINDOW_BYTES))
            if match is None:
                raise source.ends_early(key)
            return match.end()
        window += _WINDOW_BYTES
        if (window - at) % _FORGET_BYTES == 0:
            source.forget(window)
    raise source.ends_early(key)


def _container_end(source: Source, at: int, key: str) -> int:
    closing = {b"[": b"]", b"{": b"}"}
    stack: list[bytes] = []
    forgotten = at
    for match in _TOKEN.finditer(source.data, at):
        token = match.group()
        if match.start() - forgotten > _FORGET_BYTES:
            forgotten = match.start()
            source.forget(forgotten)
        if token in closing:
            stack.append(closing[token])
        elif token in (b"]", b"}"):
            if token != stack.pop():
                raise source.unexpected(match.start(), f"the end of a list or object in {key!r}")
            if not stack:
                return match.end()
        elif token == b'"':  # a quote that opens a string which never closes
            break
    raise source.ends_early(key)


def decode(source: Source, span: Span) -> Any:
    """Decode one value of any shape, NaN and Infinity included.

    Raises:
        UserError: it is no JSON, with the byte.
    """
    raw = bytes(source.data[span[0] : span[1]])
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        offset = len(raw.decode("utf-8", "replace")[: error.pos].encode())
        raise source.unexpected(span[0] + offset, "a JSON value") from error
    except UnicodeDecodeError as error:
        raise source.unexpected(span[0] + error.start, "UTF-8 text") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # an integer of thousands of digits, lists in lists without end
        raise source.error(f"byte {span[0]}: a value cannot be read: {error}") from error


def decode_text(source: Source, span: Span) -> str:
    """Decode one string."""
    value = decode(source, span)
    assert isinstance(value, str)
    return value
