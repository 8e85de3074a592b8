# SPDX-License-Identifier: Apache-2.0
"""Writing one cell: its ITLs as they come, then what follows from them per request, then the cells row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from splitbench.tables import columns, numbers
from splitbench.tables.numbers import Floats, Ints
from splitbench.tables.parts import folder_of_parts, part_writer, write_part
from splitbench.tables.schema import CELLS, REQUESTS, TOKENS

Bools = npt.NDArray[np.bool_]
Gaps = Callable[[], Iterable[tuple[Floats, Ints]]]
"""Gives the ITLs in seconds, some requests at a time: values laid end to end and the number per request."""

ROWS_AT_ONCE = 1 << 19
"""ITLs that are held and written together (and become one row group): 4 MiB of values."""


class CellPaths(NamedTuple):
    """The files of one cell."""

    cell: Path
    requests: Path
    tokens: Path


@dataclass
class Requests:
    """Per-request columns of one cell, in submission order; NaN or None: the source has none.

    Attributes:
        ok: answered in full.
        errors: error texts ("" where there is none).
        start_s: seconds on the client's clock.
        ttft_s, e2e_s, queue_s: seconds.
        itl_mean_s: mean gap where the source gives no single ones, seconds.
        input_tokens, output_tokens: counts.
    """

    ok: Bools
    errors: list[str] | None = None
    start_s: Floats | None = None
    ttft_s: Floats | None = None
    e2e_s: Floats | None = None
    queue_s: Floats | None = None
    itl_mean_s: Floats | None = None
    input_tokens: Floats | None = None
    output_tokens: Floats | None = None


@dataclass
class _Derived:
    """What the ITLs say about each request; NaN where they say nothing. Seconds."""

    itls: Ints | None
    total: Floats
    first: Floats
    largest: Floats
    p99: Floats
    later_median: Floats


def write_cell(requests: Requests, gaps: Gaps, cell: Mapping[str, Any], destination: Path) -> CellPaths:
    """Write a cell's parts of `tokens`, `requests` and `cells`, all or none.

    Args:
        requests: per-request columns; empty where the source has only totals.
        gaps: the ITLs; may give nothing.
        cell: columns of the cells row, `cell_id` among them; counts that the requests show replace the stated
            ones.
        destination: the cell's folder.

    Raises:
        UserError: a value does not fit its column.
    """
    cell_id = str(cell["cell_id"])
    with folder_of_parts(destination) as folder:
        derived = _write_tokens(requests, gaps(), cell, folder)
        write_part("requests", _requests_table(requests, derived, cell_id), folder, cell)
        row = dict(cell) | _counts(requests)
        if requests.start_s is not None and np.isfinite(requests.start_s).any():
            row["clock_origin_s"] = float(np.nanmin(requests.start_s))
        write_part("cells", [row], folder, cell)
    return CellPaths(destination / CELLS.file, destination / REQUESTS.file, destination / TOKENS.file)


def _gathered(gaps: Iterable[tuple[Floats, Ints]]) -> Iterator[tuple[Floats, Ints]]:
    """The same requests in pieces of about `ROWS_AT_ONCE` ITLs."""
    values: list[Floats] = []
    lengths: list[Ints] = []
    held = 0
    for piece, sizes in gaps:
        values.append(piece)
        lengths.append(sizes)
        held += len(piece)
        if held >= ROWS_AT_ONCE:
            yield np.concatenate(values), np.concatenate(lengths)
            values, lengths, held = [], [], 0
    if lengths:
        yield np.concatenate(values), np.concatenate(lengths)


def _write_tokens(
    requests: Requests, gaps: Iterable[tuple[Floats, Ints]], cell: Mapping[str, Any], folder: Path
) -> _Derived:
    count, cell_id = len(requests.ok), str(cell["cell_id"])
    # Elsewhere the first gap is an ordinary decode step and the hand-off lies inside the TTFT.
    wants_handoff = cell.get("first_token") == "prefiller"
    seen: list[Ints] = []
    pieces: list[tuple[Floats, ...]] = []
    done = 0
    with part_writer(TOKENS, folder / TOKENS.file, cell) as writer:
        for values, lengths in _gathered(gaps):
            ok = requests.ok[done : done + len(lengths)]
            if len(values) and len(ok) == len(lengths):
                writer.write_table(
                    tokens_table(cell_id, done, values, lengths, ok), row_group_size=len(values)
                )
            seen.append(lengths)
            pieces.append(
                (
                    numbers.list_sums(values, lengths),
                    numbers.list_firsts(values, lengths),
                    numbers.list_maxima(values, lengths),
                    numbers.list_quantiles(values, lengths, 0.99),
                    numbers.list_quantiles(values, lengths, 0.5, skip=1)
                    if wants_handoff
                    else np.full(len(lengths), np.nan),
                )
            )
            done += len(lengths)
    if not seen:
        nothing = np.full(count, np.nan)
        return _Derived(None, nothing, nothing, nothing, nothing, nothing)
    return _Derived(np.concatenate(seen), *(np.concatenate(column) for column in zip(*pieces, strict=True)))


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
    before_first = (np.cumsum(lengths) - lengths - 1).astype(np.int32)
    position = np.arange(total, dtype=np.int32)
    position -= np.repeat(before_first, lengths)
    good = np.ones(total, np.bool_) if ok.all() else np.repeat(ok, lengths)
    return pa.Table.from_arrays(
        [
            columns.constant(cell_id, total),
            columns.plain(request, pa.int32()),
            columns.plain(position, pa.int32()),
            columns.plain(values_s * 1e3, pa.float64()),
            columns.plain(good, pa.bool_()),
        ],
        schema=TOKENS.schema,
    )


def _requests_table(requests: Requests, derived: _Derived, cell_id: str) -> pa.Table:
    count, ok = len(requests.ok), requests.ok
    nothing = np.full(count, np.nan)
    ttft = requests.ttft_s if requests.ttft_s is not None else nothing
    output = requests.output_tokens if requests.output_tokens is not None else nothing
    # A request without any gap after its first token took exactly its TTFT.
    sums = np.where(np.isnan(derived.total) & (output == 1), 0.0, derived.total)
    stated = requests.e2e_s
    e2e = np.where(ok, ttft + sums if stated is None else stated, np.nan)
    mean = requests.itl_mean_s if requests.itl_mean_s is not None else nothing
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(output >= 2, (e2e - ttft) / (output - 1), np.nan)
        if derived.itls is not None:
            mean = np.where(derived.itls > 0, derived.total / derived.itls, mean)
    start = requests.start_s
    if start is not None and np.isfinite(start).any():
        start = start - np.nanmin(start)
    errors = requests.errors if requests.errors is not None else [""] * count
    known_e2e = np.isfinite(e2e)
    made = {
        "cell_id": columns.constant(cell_id, count),
        "request": columns.plain(np.arange(count), pa.int32()),
        "ok": columns.plain(ok, pa.bool_()),
        "error": columns.from_values(
            [None if good else text for good, text in zip(ok, errors, strict=True)], pa.string()
        ),
        "start_s": columns.floats(start, count),
        "ttft_ms": columns.floats(ttft, count, 1e3),
        "second_token_ms": columns.floats(ttft + derived.first, count, 1e3),
        "e2e_ms": columns.floats(e2e, count, 1e3),
        "e2e_derived": columns.plain(np.full(count, stated is None), pa.bool_(), known_e2e),
        "queue_ms": columns.floats(requests.queue_s, count, 1e3),
        "tpot_ms": columns.floats(tpot, count, 1e3),
        "itl_mean_ms": columns.floats(mean, count, 1e3),
        "itl_p99_ms": columns.floats(derived.p99, count, 1e3),
        "itl_max_ms": columns.floats(derived.largest, count, 1e3),
        "handoff_gap_ms": columns.floats(derived.first - derived.later_median, count, 1e3),
        "itls": columns.counts(None if derived.itls is None else derived.itls.astype(np.float64), count),
        "input_tokens": columns.counts(requests.input_tokens, count),
        "output_tokens": columns.counts(requests.output_tokens, count),
    }
    return pa.Table.from_arrays([made[c.name] for c in REQUESTS.columns], schema=REQUESTS.schema)


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
