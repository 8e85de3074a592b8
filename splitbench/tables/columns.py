# SPDX-License-Identifier: Apache-2.0
"""Arrow columns from numpy arrays and Python values, by their buffers.

`pyarrow.array` imports pandas at its first call, which would cost every cell's ingest about half a second;
building the buffers directly does not, and copies nothing that is already in the right layout.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Mask = npt.NDArray[np.bool_]

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def plain(values: npt.NDArray[Any], type_: pa.DataType, valid: Mask | None = None) -> pa.Array:
    """A column of numbers or truth values.

    Args:
        values: one-dimensional; converted to the type's width.
        type_: an Arrow integer, float, boolean or timestamp type.
        valid: False where the column is null; None if it is null nowhere.
    """
    count = len(values)
    if pa.types.is_boolean(type_):
        data = np.packbits(values.astype(np.bool_), bitorder="little")
    else:
        width = np.int64 if pa.types.is_timestamp(type_) else type_.to_pandas_dtype()
        data = np.ascontiguousarray(values, dtype=width)
    return pa.Array.from_buffers(type_, count, [_validity(valid), pa.py_buffer(data)])


def floats(values: npt.NDArray[np.float64] | None, count: int, factor: float = 1.0) -> pa.Array:
    """A column of doubles, scaled by a factor; NaN (and a missing array) is null."""
    if values is None:
        return plain(np.zeros(count), pa.float64(), np.zeros(count, np.bool_))
    missing = np.isnan(values)
    scaled = values if factor == 1.0 else values * factor
    return plain(scaled, pa.float64(), ~missing if missing.any() else None)


def counts(values: npt.NDArray[np.float64] | None, count: int) -> pa.Array:
    """A column of 32-bit whole numbers; what is none (NaN, infinite, too large) is null."""
    if values is None:
        return plain(np.zeros(count, np.int32), pa.int32(), np.zeros(count, np.bool_))
    whole = np.isfinite(values) & (np.abs(values) < 2**31)
    return plain(np.where(whole, values, 0).astype(np.int32), pa.int32(), None if whole.all() else whole)


def constant(value: str, count: int) -> pa.Array:
    """A dictionary-encoded column that holds the same text in every row."""
    indices = pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(bytes(4 * count))])
    return pa.DictionaryArray.from_arrays(indices, from_values([value], pa.string()))


def from_values(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """A column from Python values; None is null.

    Args:
        values: what the type expects: numbers, bool, str, aware datetimes, or mappings for map types.
        type_: number, boolean, string, timestamp, map, or dictionary of strings.

    Raises:
        TypeError, ValueError, OverflowError: a value that does not fit the type.
    """
    present = np.array([value is not None for value in values], dtype=np.bool_)
    valid = None if present.all() else present
    if pa.types.is_dictionary(type_):
        distinct = list(dict.fromkeys(value for value in values if value is not None))
        place = {value: k for k, value in enumerate(distinct)}
        indices = np.array([place.get(value, 0) for value in values], dtype=np.int32)
        keys = from_values(distinct, type_.value_type)
        return pa.DictionaryArray.from_arrays(plain(indices, type_.index_type, valid), keys)
    if pa.types.is_string(type_):
        return _strings(values, valid)
    if pa.types.is_map(type_):
        return _maps(values, type_, valid)
    if pa.types.is_timestamp(type_):
        step = datetime.timedelta(microseconds=1)
        micros = [0 if value is None else (value - _EPOCH) // step for value in values]
        return plain(np.array(micros, dtype=np.int64), type_, valid)
    return _numbers(values, type_, valid)


def _numbers(values: Sequence[Any], type_: pa.DataType, valid: Mask | None) -> pa.Array:
    kinds: tuple[type, ...]
    if pa.types.is_boolean(type_):
        kinds = (bool, np.bool_)
    elif pa.types.is_integer(type_):
        kinds = (int, np.integer)
    else:
        kinds = (int, float, np.integer, np.floating)
    for value in values:
        wrong_bool = isinstance(value, bool) and not pa.types.is_boolean(type_)
        if value is not None and (wrong_bool or not isinstance(value, kinds)):
            raise TypeError(f"{value!r} is no {type_}")
    filled = [0 if value is None else value for value in values]
    if pa.types.is_integer(type_):
        limit = np.iinfo(type_.to_pandas_dtype())
        for value in filled:
            if not limit.min <= value <= limit.max:
                raise OverflowError(f"{value} does not fit {type_}")
    return plain(np.array(filled, dtype=type_.to_pandas_dtype()), type_, valid)


def _strings(values: Sequence[Any], valid: Mask | None) -> pa.Array:
    encoded = []
    for value in values:
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{value!r} is no text")
        # A lone surrogate (broken JSON text) has no UTF-8 form; it is kept visible rather than refused.
        encoded.append(b"" if value is None else value.encode("utf-8", "backslashreplace"))
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    buffers = [_validity(valid), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def _maps(values: Sequence[Mapping[str, Any] | None], type_: pa.MapType, valid: Mask | None) -> pa.Array:
    items = [list(value.items()) if value is not None else [] for value in values]
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(item) for item in items], out=offsets[1:])
    flat = [pair for item in items for pair in item]
    keys = from_values([key for key, _ in flat], type_.key_type)
    entries = from_values([value for _, value in flat], type_.item_type)
    pairs = pa.StructArray.from_arrays([keys, entries], fields=[type_.key_field, type_.item_field])
    return pa.Array.from_buffers(
        type_, len(values), [_validity(valid), pa.py_buffer(offsets)], children=[pairs]
    )


def _validity(valid: Mask | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
