# SPDX-License-Identifier: Apache-2.0
"""What must hold for any table and any file."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from results import detailed
from splitbench.errors import UserError
from splitbench.tables import columns, numbers
from splitbench.tables.ingest import ingest_cell
from splitbench.tables.parts import write_part
from splitbench.tables.scan import open_source, scan_objects
from splitbench.tables.schema import TABLES

FILES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

_text = st.text(st.characters(codec="utf-8"), max_size=20)
_finite = st.floats(allow_nan=False)
_exact = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 10**15)


def _values(type_: pa.DataType) -> st.SearchStrategy:
    if pa.types.is_map(type_):
        item = _finite if pa.types.is_floating(type_.item_type) else _text
        return st.dictionaries(_text, item, max_size=4)
    if pa.types.is_timestamp(type_):
        return st.datetimes(datetime.datetime(1980, 1, 1), datetime.datetime(2200, 1, 1)).map(
            lambda moment: moment.replace(tzinfo=datetime.UTC)
        )
    if pa.types.is_boolean(type_):
        return st.booleans()
    if pa.types.is_integer(type_):
        bits = type_.bit_width - 1
        return st.integers(-(2**bits), 2**bits - 1)
    return _finite if pa.types.is_floating(type_) else _text


def _rows(name: str) -> st.SearchStrategy:
    fields = {}
    for column in TABLES[name].columns:
        if column.name != "cell_id":
            value = _values(column.type)
            fields[column.name] = st.none() | value if column.nullable else value
    return st.lists(st.fixed_dictionaries(fields), min_size=1, max_size=6)


@FILES
@given(data=st.data(), name=st.sampled_from(sorted(TABLES)))
def test_any_table_round_trips(tmp_path, data, name):
    rows = data.draw(_rows(name))
    path = write_part(name, rows, tmp_path, {"cell_id": "a/b/c1/1-1"})
    back = pq.read_table(path).to_pylist()
    for row in back:
        for column in TABLES[name].columns:
            if pa.types.is_map(column.type) and row[column.name] is not None:
                row[column.name] = dict(row[column.name])
    assert back == [{"cell_id": "a/b/c1/1-1", **row} for row in rows]


@given(st.lists(st.none() | st.floats(width=64)), st.lists(st.none() | st.integers(-(2**31), 2**31 - 1)))
def test_columns_equal_pyarrows_own(floats, whole):
    assert columns.from_values(floats, pa.float64()).to_pylist() == pytest.approx(floats, nan_ok=True)
    assert columns.from_values(whole, pa.int32()).equals(pa.array(whole, pa.int32()))
    assert columns.from_values(whole, pa.int64()).equals(pa.array(whole, pa.int64()))


@FILES
@given(
    lists=st.lists(
        st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 10**15), max_size=9)
    ),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]),
    chunk=st.integers(1, 200),
    simd=st.booleans(),
)
def test_any_lists_of_numbers_decode_exactly(tmp_path, lists, separators, chunk, simd):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"itls": lists, "after": '"]]'}, separators=separators))
    saved = numbers.simdjson
    try:
        numbers.simdjson = saved if simd else None
        with open_source(path) as source:
            span = scan_objects(source)[0]["itls"]
            pieces = list(numbers.number_lists(source, span, "itls", chunk))
    finally:
        numbers.simdjson = saved
    assert [n for _, lengths in pieces for n in lengths.tolist()] == [len(x) for x in lists]
    assert [v for values, _ in pieces for v in values.tolist()] == [float(v) for x in lists for v in x]


_INSERTED = [b"]", b"[", b'"', b"}", b"{", b",", b"\\", b"NaN", b"null", b"1e999", b"\xff"]
_KEYS = ["ttfts", "itls", "errors", "input_lens", "latencies", "num_prompts", "duration"]


def _mutated(text: str, rng: random.Random) -> bytes:
    raw = bytearray(text.encode())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw))
        kind = rng.randrange(5)
        if kind == 0:
            raw[at] = rng.randrange(256)
        elif kind == 1:
            del raw[at : at + rng.randint(1, 30)]
        elif kind == 2:
            raw[at:at] = rng.choice(
                [b"]", b"[", b'"', b"}", b"{", b",", b"\\", b"NaN", b"null", b"1e999", b"\xff"]
            )
        elif kind == 3:
            raw[at:at] = bytes(raw[at : at + rng.randint(1, 60)])
        else:
            raw[at] = ord(rng.choice('[]{}",:-.0 eE+'))
        if not raw:
            raw = bytearray(b" ")
    return bytes(raw)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_mutated_json_gives_a_result_or_one_line(tmp_path, seed):
    rng = random.Random(seed)
    path = tmp_path / "r.json"
    path.write_bytes(_mutated(json.dumps(detailed(requests=3, tokens=4)), rng))
    with contextlib.suppress(UserError):
        ingest_cell(path, {"cell_id": "x"}, tmp_path / "cell")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    replaced=st.sampled_from(
        ["ttfts", "itls", "errors", "input_lens", "latencies", "num_prompts", "duration"]
    ),
    value=st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=12,
    ),
)
def test_any_value_under_a_known_key_gives_a_result_or_one_line(tmp_path, replaced, value):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(detailed(requests=3, tokens=4) | {replaced: value}))
    with contextlib.suppress(UserError):
        ingest_cell(path, {"cell_id": "x"}, tmp_path / "cell")


@given(
    lists=st.lists(st.lists(st.floats(-1e6, 1e6), max_size=12), max_size=12),
    p=st.floats(0, 1),
    skip=st.integers(0, 2),
)
def test_list_reductions_equal_numpy(lists, p, skip):
    values = np.array([v for x in lists for v in x])
    lengths = np.array([len(x) for x in lists], dtype=np.int64)
    sums, maxima = numbers.list_sums(values, lengths), numbers.list_maxima(values, lengths)
    firsts, quantiles = numbers.list_firsts(values, lengths), numbers.list_quantiles(values, lengths, p, skip)
    for k, x in enumerate(lists):
        assert math.isnan(sums[k]) if not x else sums[k] == pytest.approx(sum(x), abs=1e-6)
        assert math.isnan(maxima[k]) if not x else maxima[k] == max(x)
        assert math.isnan(firsts[k]) if not x else firsts[k] == x[0]
        rest = x[skip:]
        assert (
            math.isnan(quantiles[k])
            if not rest
            else quantiles[k] == pytest.approx(np.quantile(rest, p), abs=1e-6)
        )


def test_strings_with_lone_surrogates_are_kept_visible(tmp_path: Path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(detailed(requests=1, tokens=2) | {"tag": "\ud800x"}))
    paths = ingest_cell(path, {"cell_id": "x"}, tmp_path / "cell")
    assert dict(pq.read_table(paths.cell).to_pylist()[0]["client_other"])["tag"] == "\\ud800x"
