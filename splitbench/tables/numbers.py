# SPDX-License-Identifier: Apache-2.0
"""Lists of numbers: from JSON text to arrays of doubles, and sums, maxima and quantiles per list."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from splitbench.errors import UserError
from splitbench.tables.scan import Source, Span, decode, skip_space

try:  # flat buffers without a Python object per number; no wheel for every Python, hence the other way
    import simdjson as _simdjson
except ImportError:
    _simdjson = None  # type: ignore[assignment]
simdjson: Any = _simdjson

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CHUNK_BYTES = 1 << 20
"""JSON text decoded at a time: large enough to amortise a call, small enough to keep memory flat."""

_LISTS = msgspec.json.Decoder(list[list[float]])


def number_list(source: Source, span: Span, key: str) -> Floats:
    """Decode a list of numbers; null, NaN and a missing measurement are NaN.

    Raises:
        UserError: not a list, or something in it is not a number.
    """
    value = decode(source, span)
    if not isinstance(value, list):
        raise source.error(f"{key}: a list of numbers is expected, found {kind_of(value)}")
    return _checked(source, value, key)


def _checked(source: Source, values: list[Any], key: str) -> Floats:
    kinds = set(map(type, values))
    if not kinds <= {int, float, type(None)}:
        place, value = next((k, v) for k, v in enumerate(values) if type(v) not in (int, float, type(None)))
        raise source.error(f"{key}[{place}]: a number is expected, found {kind_of(value)}")
    if type(None) in kinds:
        values = [np.nan if v is None else v for v in values]
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError as error:
        raise source.error(f"{key}: a number is too large for a double") from error


def text_list(source: Source, span: Span, key: str) -> list[str]:
    """Decode a list of strings; null is the empty string."""
    value = decode(source, span)
    if not isinstance(value, list):
        raise source.error(f"{key}: a list of texts is expected, found {kind_of(value)}")
    if set(map(type, value)) <= {str}:
        return value
    return [v if isinstance(v, str) else "" if v is None else str(v) for v in value]


def number_lists(
    source: Source, span: Span, key: str, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[Floats, Ints]]:
    """Decode a list of lists of numbers piece by piece.

    Yields:
        The numbers of the next lists, laid end to end, and the length of each of these lists.

    Raises:
        UserError: something else than lists of numbers.
    """
    data = source.data
    at, end = span[0] + 1, span[1] - 1
    if data[span[0] : span[0] + 1] != b"[":
        raise source.error(
            f"{key}: a list of lists of numbers is expected, found {kind_of(decode(source, span))}"
        )
    if skip_space(source, at) >= end:
        return
    decoder = _Lists(source, key)
    while True:
        stop = data.find(b"]", min(at + chunk_bytes, end), end)
        stop = end if stop < 0 else stop + 1
        yield decoder.decode(at, stop)
        source.forget(stop)
        at = skip_space(source, stop)
        if at >= end:
            return
        if data[at : at + 1] != b",":
            raise source.unexpected(at, f"a comma in {key!r}")
        at = skip_space(source, at + 1)


def _no_lists(source: Source, span: Span, key: str) -> UserError:
    found = kind_of(decode(source, span))
    return source.error(f"{key}: a list of lists of numbers is expected, found {found}")


def count_lists(source: Source, span: Span, key: str) -> int:
    """How many lists a list of number lists holds, by its brackets.

    Raises:
        UserError: it is no list.
    """
    if source.data[span[0] : span[0] + 1] != b"[":
        raise source.error(
            f"{key}: a list of lists of numbers is expected, found {kind_of(decode(source, span))}"
        )
    pieces = range(span[0], span[1], CHUNK_BYTES)
    return sum(source.data[at : min(at + CHUNK_BYTES, span[1])].count(b"]") for at in pieces) - 1


class _Lists:
    """Decodes pieces of a list of number lists, by the fastest way that accepts them."""

    def __init__(self, source: Source, key: str) -> None:
        self._source = source
        self._key = key
        self._parser = simdjson.Parser() if simdjson is not None else None

    def decode(self, at: int, stop: int) -> tuple[Floats, Ints]:
        """Numbers laid end to end and the length of each of the lists that these bytes hold."""
        with memoryview(self._source.data) as view:
            raw = b"".join((b"[", view[at:stop], b"]"))
        flat = self._by_simdjson(raw) if self._parser is not None else self._by_msgspec(raw)
        return flat if flat is not None else self._by_json(raw, at)

    def _by_simdjson(self, raw: bytes) -> tuple[Floats, Ints] | None:
        """None where the text is not lists of plain numbers, so that the careful decoder says what it is."""
        parser: Any = self._parser
        document = lists = None
        try:
            document = parser.parse(raw)
            lists = list(document)
            brackets = np.count_nonzero(np.frombuffer(raw, np.uint8) == ord("["))
            if brackets != len(lists) + 1:  # numbers among the lists, or lists in them
                return None
            lengths = np.fromiter(map(len, lists), np.int64, len(lists))
            values = (
                np.frombuffer(document.as_buffer(of_type="d"), np.float64) if lengths.any() else np.empty(0)
            )
        except (ValueError, TypeError, RuntimeError):  # the last one: a whole number of more than 64 bits
            return None
        finally:
            del document, lists  # the parser may be used again only when nothing points into it
        return (values, lengths) if len(values) == lengths.sum() else None

    def _by_msgspec(self, raw: bytes) -> tuple[Floats, Ints] | None:
        try:
            lists = _LISTS.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return np.fromiter(itertools.chain.from_iterable(lists), np.float64, int(lengths.sum())), lengths

    def _by_json(self, raw: bytes, at: int) -> tuple[Floats, Ints]:
        """Reads NaN, Infinity and null too, and names what cannot be read."""
        source, key = self._source, self._key
        try:
            lists = json.loads(raw)
        except (ValueError, RecursionError) as error:
            # Positions in the message count from the piece's first byte, with the bracket put before it.
            place = at + max(0, getattr(error, "pos", 1) - 1)
            raise source.unexpected(place, f"a list of numbers in {key!r}") from error
        for item in lists:
            if not isinstance(item, list):
                raise source.error(
                    f"{key}: lists of numbers are expected, found {kind_of(item)} near byte {at}"
                )
        arrays = [_checked(source, item, key) for item in lists]
        lengths = np.array([len(a) for a in arrays], np.int64)
        return (np.concatenate(arrays) if arrays else np.empty(0)), lengths


def kind_of(value: Any) -> str:
    """What a decoded value is, in words for an error message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "a number"
    return "a list" if isinstance(value, list) else "an object"


def list_sums(values: Floats, lengths: Ints) -> Floats:
    """Sum of each list; NaN for an empty one."""
    return _reduced(np.add, values, lengths)


def list_maxima(values: Floats, lengths: Ints) -> Floats:
    """Largest of each list; NaN for an empty one."""
    return _reduced(np.maximum, values, lengths)


def _reduced(operation: np.ufunc, values: Floats, lengths: Ints) -> Floats:
    result = np.full(len(lengths), np.nan)
    filled = lengths > 0
    if filled.any():
        starts = (np.cumsum(lengths) - lengths)[filled]
        result[filled] = operation.reduceat(values, starts)
    return result


def list_firsts(values: Floats, lengths: Ints) -> Floats:
    """First of each list; NaN for an empty one."""
    result = np.full(len(lengths), np.nan)
    filled = lengths > 0
    result[filled] = values[(np.cumsum(lengths) - lengths)[filled]]
    return result


def list_quantiles(values: Floats, lengths: Ints, p: float, skip: int = 0) -> Floats:
    """Quantile of each list, linear between order statistics as numpy's default.

    Args:
        values: the lists laid end to end.
        lengths: length of each.
        p: 0 to 1.
        skip: leading values of each list that are left out.

    Returns:
        One per list; NaN where nothing is left.
    """
    result = np.full(len(lengths), np.nan)
    starts = np.cumsum(lengths) - lengths
    for length in np.unique(lengths):
        count = int(length) - skip
        if count <= 0:
            continue
        which = np.flatnonzero(lengths == length)
        if len(which) == len(lengths):
            rows = values.reshape(len(lengths), int(length))[:, skip:]
        else:
            rows = values[starts[which, None] + np.arange(skip, int(length))]
        place = p * (count - 1)
        below, above = int(np.floor(place)), int(np.ceil(place))
        ordered = np.partition(rows, above, axis=1)
        high = ordered[:, above]
        # One pivot and a maximum are cheaper than two pivots.
        low = ordered[:, :above].max(axis=1) if below < above else high
        result[which] = low + (high - low) * (place - below)
    return result
