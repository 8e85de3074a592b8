# SPDX-License-Identifier: Apache-2.0
"""From a client's result file to one cell's Parquet parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from splitbench.errors import UserError
from splitbench.tables import numbers
from splitbench.tables.bench_serve import Result, cell_facts, ragged, read_results
from splitbench.tables.cellwriter import CellPaths, Requests, write_cell
from splitbench.tables.numbers import Floats, Ints
from splitbench.tables.scan import open_source
from splitbench.tables.schema import CELLS


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
        facts["source_sha256"] = source.sha256()
        merged = facts | {key: value for key, value in cell.items() if value is not None}
        requests = requests_of(result) if result.detailed else Requests(np.ones(0, np.bool_))
        return write_cell(requests, lambda: _counted_itls(result, len(requests.ok)), merged, destination)


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


def _counted_itls(result: Result, requests: int) -> Iterator[tuple[Floats, Ints]]:
    seen = 0
    for values, lengths in result.itls():
        seen += len(lengths)
        if seen <= requests:
            yield values, lengths
    if result.itls_span is not None and seen != requests:
        raise ragged(result.source, "itls", seen, "the other arrays", requests)


def requests_of(result: Result) -> Requests:
    """Per-request columns of a detailed result."""
    arrays = result.arrays
    count = result.requests
    if not count and result.itls_span is not None:
        count = numbers.count_lists(result.source, result.itls_span, "itls")
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
