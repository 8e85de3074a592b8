# SPDX-License-Identifier: Apache-2.0
"""From a client's result file to one cell's Parquet parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from splitbench.errors import UserError
from splitbench.files import sha256_file
from splitbench.tables import numbers
from splitbench.tables.bench_serve import Result, cell_facts, ragged, read_results
from splitbench.tables.numbers import Floats, Ints
from splitbench.tables.parts import cell_id_column, folder_of_parts, part_writer, write_part
from splitbench.tables.scan import open_source
from splitbench.tables.schema import CELLS, REQUESTS, TOKENS

Bools = npt.NDArray[np.bool_]


class CellPaths(NamedTuple):
    """The files that an ingest wrote."""

    cell: Path
    requests: Path
    tokens: Path


@dataclass
class Requests:
    """Per-request columns of one cell, in submission order; NaN is "the source has none".

    Attributes:
        ok: answered in full.
        errors: error texts ("" where there is none).
        start_s: seconds on the client's clock.
        ttft_s, e2e_s, queue_s: seconds.
        input_tokens, output_tokens: counts.
    """

    ok: Bools
    errors: list[str] | None = None
    start_s: Floats | None = None
    ttft_s: Floats | None = None
    e2e_s: Floats | None = None
    queue_s: Floats | None = None
    input_tokens: Floats | None = None
    output_tokens: Floats | None = None


Gaps = Callable[[], Iterable[tuple[Floats, Ints]]]
"""Gives the ITLs in seconds, some requests at a time: values laid end to end and the number per request."""


def ingest_cell(
    raw: Path, cell: Mapping[str, Any], destination: Path, record: int | None = None
) -> CellPaths:
    """Turn a `vllm bench serve` result into the cell's parts of `cells`, `requests` and `tokens`.

    Args:
        raw: the client's JSON, written with or without --save-detailed, once or appended to.
        cell: columns of the cells table that the run knows (`cell_id` at least); they go before what the file
            states.
        destination: the cell's folder; it gets cell.parquet, requests.parquet and tokens.parquet, all or
            none.
        record: which result, from 1, where the file holds several.

    Raises:
        UserError: the file is missing, empty, cut, foreign or contradicts the cell; nothing is written then.
    """
    _check_identity(cell, raw)
    with open_source(raw) as source:
        results = read_results(source)
        result = _one_of(results, record, raw)
        _reject_other_load(result, cell, raw)
        facts = cell_facts(result)
        facts["source_name"] = raw.name if len(results) == 1 else f"{raw.name}#{result.number}"
        facts["source_sha256"] = sha256_file(raw)
        merged = facts | {key: value for key, value in cell.items() if value is not None}
        requests = requests_of(result) if result.detailed else Requests(np.ones(0, np.bool_))
        return write_cell(requests, lambda: _counted_itls(result), merged, destination)


def _check_identity(cell: Mapping[str, Any], raw: Path) -> None:
    columns = {c.name for c in CELLS.columns}
    unknown = sorted(set(cell) - columns)
    if unknown:
        raise UserError(
            f"the cell's record has an unknown key {unknown[0]}",
            where=str(raw),
            mend=f"use: {', '.join(columns)}",
        )
    if not cell.get("cell_id"):
        raise UserError("the cell's record has no cell_id", where=str(raw))


def _one_of(results: list[Result], record: int | None, raw: Path) -> Result:
    if record is None and len(results) == 1:
        return results[0]
    if record is None:
        raise UserError(
            f"holds {len(results)} results where one is expected",
            where=str(raw),
            mend=f"say which: record 1 to {len(results)}",
        )
    if not 1 <= record <= len(results):
        raise UserError(f"has no record {record}; it holds {len(results)}", where=str(raw))
    return results[record - 1]


def _reject_other_load(result: Result, cell: Mapping[str, Any], raw: Path) -> None:
    asked, found = cell.get("concurrency"), result.scalars.get("max_concurrency")
    if asked is not None and found is not None and int(asked) != found:
        raise UserError(
            f"holds a run at concurrency {found}, the cell asks for {asked}",
            where=str(raw),
            mend="run the cell again",
        )


def _counted_itls(result: Result) -> Iterator[tuple[Floats, Ints]]:
    seen = 0
    for values, lengths in result.itls():
        seen += len(lengths)
        yield values, lengths
    if result.itls_span is not None and seen != result.requests and result.requests:
        raise ragged(result.source, "itls", seen, "the other arrays", result.requests)


def requests_of(result: Result) -> Requests:
    """Per-request columns of a detailed result."""
    arrays = result.arrays
    count = result.requests
    if not count and result.itls_span is not None:
        count = numbers.count_lists(result.source, result.itls_span)
    ok = result.ok() if result.requests else np.ones(count, np.bool_)
    ttft = arrays.get("ttfts")
    # 0.0 is how the client writes "no first token came".
    ttft = np.where(ttft > 0.0, ttft, np.nan) if ttft is not None else None
    return Requests(
        ok=ok,
        errors=result.errors,
        start_s=arrays.get("start_times"),
        ttft_s=ttft,
        e2e_s=arrays.get("latencies"),
        queue_s=arrays.get("queue_times"),
        input_tokens=arrays.get("input_lens"),
        output_tokens=arrays.get("output_lens"),
    )


def write_cell(requests: Requests, gaps: Gaps, cell: Mapping[str, Any], destination: Path) -> CellPaths:
    """Write a cell's three parts: ITLs as they come, then what is derived per request, then the cells row.

    Args:
        requests: per-request columns.
        gaps: the ITLs; may give nothing.
        cell: columns of the cells row; counts that the requests show replace the stated ones.
        destination: the cell's folder.

    Raises:
        UserError: a value does not fit its column.
    """
    prefiller_first = cell.get("first_token") == "prefiller"
    with folder_of_parts(destination) as folder:
        derived = _write_tokens(requests, gaps(), cell, folder, prefiller_first)
        table = _requests_table(requests, derived, str(cell["cell_id"]))
        write_part("requests", table, folder, cell)
        row = dict(cell) | _counts(requests)
        if requests.start_s is not None and np.isfinite(requests.start_s).any():
            row["clock_origin_s"] = float(np.nanmin(requests.start_s))
        write_part("cells", [row], folder, cell)
    return CellPaths(destination / CELLS.file, destination / REQUESTS.file, destination / TOKENS.file)


@dataclass
class _Derived:
    """What the ITLs say about each request; NaN where they say nothing. Seconds."""

    itls: Ints | None
    total: Floats
    first: Floats
    largest: Floats
    p99: Floats
    later_median: Floats


def _write_tokens(
    requests: Requests,
    gaps: Iterable[tuple[Floats, Ints]],
    cell: Mapping[str, Any],
    folder: Path,
    prefiller_first: bool,
) -> _Derived:
    count = len(requests.ok)
    pieces: list[tuple[Floats, ...]] = []
    lengths_seen: list[Ints] = []
    done = 0
    with part_writer(TOKENS, folder / TOKENS.file, cell) as writer:
        for values, lengths in gaps:
            pieces.append(
                (
                    numbers.list_sums(values, lengths),
                    numbers.list_firsts(values, lengths),
                    numbers.list_maxima(values, lengths),
                    numbers.list_quantiles(values, lengths, 0.99),
                    numbers.list_quantiles(values, lengths, 0.5, skip=1)
                    if prefiller_first
                    else np.full(len(lengths), np.nan),
                )
            )
            lengths_seen.append(lengths)
            ok = requests.ok[done : done + len(lengths)]
            if len(values) and len(ok) == len(lengths):
                writer.write_table(tokens_table(str(cell["cell_id"]), done, values, lengths, ok))
            done += len(lengths)
    if not lengths_seen:
        nothing = np.full(count, np.nan)
        return _Derived(None, nothing, nothing, nothing, nothing, nothing)
    columns = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    return _Derived(np.concatenate(lengths_seen), *columns)


def tokens_table(cell_id: str, first_request: int, values_s: Floats, lengths: Ints, ok: Bools) -> pa.Table:
    """Rows of the tokens table for consecutive requests.

    Args:
        cell_id: the cell.
        first_request: number of the first of these requests.
        values_s: their ITLs in seconds, laid end to end.
        lengths: number of ITLs of each.
        ok: whether each was answered.
    """
    total = len(values_s)
    request = np.repeat(np.arange(first_request, first_request + len(lengths), dtype=np.int32), lengths)
    starts = (np.cumsum(lengths) - lengths - 1).astype(np.int32)
    position = np.arange(total, dtype=np.int32)
    position -= np.repeat(starts, lengths)
    good = pa.array(np.ones(total, np.bool_) if ok.all() else np.repeat(ok, lengths))
    return pa.Table.from_arrays(
        [
            cell_id_column(cell_id, total),
            pa.array(request),
            pa.array(position),
            pa.array(values_s * 1e3),
            good,
        ],
        schema=TOKENS.schema,
    )


def _requests_table(requests: Requests, derived: _Derived, cell_id: str) -> pa.Table:
    count = len(requests.ok)
    nothing = np.full(count, np.nan)
    ok = requests.ok
    ttft = requests.ttft_s if requests.ttft_s is not None else nothing
    output = requests.output_tokens if requests.output_tokens is not None else nothing
    # A request without any gap after its first token took exactly its TTFT.
    sums = np.where(np.isnan(derived.total) & (output == 1), 0.0, derived.total)
    stated = requests.e2e_s
    e2e_derived = stated is None
    e2e = ttft + sums if stated is None else stated
    e2e = np.where(ok, e2e, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(output >= 2, (e2e - ttft) / (output - 1), np.nan)
        mean = derived.total / derived.itls if derived.itls is not None else nothing
    start = requests.start_s
    if start is not None and np.isfinite(start).any():
        start = start - np.nanmin(start)
    errors = requests.errors if requests.errors is not None else [""] * count
    columns = {
        "cell_id": cell_id_column(cell_id, count),
        "request": pa.array(np.arange(count, dtype=np.int32)),
        "ok": pa.array(ok),
        "error": pa.array(
            [None if good else text for good, text in zip(ok, errors, strict=True)], pa.string()
        ),
        "start_s": _column(start, count),
        "ttft_ms": _column(ttft, count, 1e3),
        "second_token_ms": _column(ttft + derived.first, count, 1e3),
        "e2e_ms": _column(e2e, count, 1e3),
        "e2e_derived": pa.array(np.full(count, e2e_derived), mask=np.isnan(e2e)),
        "queue_ms": _column(requests.queue_s, count, 1e3),
        "tpot_ms": _column(tpot, count, 1e3),
        "itl_mean_ms": _column(mean, count, 1e3),
        "itl_p99_ms": _column(derived.p99, count, 1e3),
        "itl_max_ms": _column(derived.largest, count, 1e3),
        "handoff_gap_ms": _column(derived.first - derived.later_median, count, 1e3),
        "itls": pa.array(derived.itls, pa.int32())
        if derived.itls is not None
        else pa.nulls(count, pa.int32()),
        "input_tokens": _count_column(requests.input_tokens, count),
        "output_tokens": _count_column(requests.output_tokens, count),
    }
    return pa.Table.from_arrays([columns[c.name] for c in REQUESTS.columns], schema=REQUESTS.schema)


def _column(values: Floats | None, count: int, factor: float = 1.0) -> pa.Array:
    """A column of doubles where NaN is null."""
    if values is None:
        return pa.nulls(count, pa.float64())
    return pa.array(values * factor, pa.float64(), from_pandas=True)


def _count_column(values: Floats | None, count: int) -> pa.Array:
    if values is None:
        return pa.nulls(count, pa.int32())
    whole = np.isfinite(values) & (np.abs(values) < 2**31)
    return pa.array(np.where(whole, values, 0).astype(np.int32), mask=~whole)


def _counts(requests: Requests) -> dict[str, Any]:
    """Totals that the requests themselves show; nothing for a summary."""
    if not len(requests.ok):
        return {}
    counts: dict[str, Any] = {
        "requests_completed": int(requests.ok.sum()),
        "requests_failed": int((~requests.ok).sum()),
    }
    for name in ("input_tokens", "output_tokens"):
        values = getattr(requests, name)
        if values is not None:
            total = float(np.nansum(values[requests.ok]))
            counts[f"{name}_total"] = int(total) if math.isfinite(total) else None
    return counts
