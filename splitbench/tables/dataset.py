# SPDX-License-Identifier: Apache-2.0
"""Reading many cells' parts as one table, without holding more than a few batches of the large ones.

A part is a cell's folder (`.../<restart>-<repeat>`) or one of the Parquet files in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from splitbench.errors import UserError
from splitbench.statistics.clusters import Clustered, clustered
from splitbench.tables.schema import CELLS, TABLES

Floats = npt.NDArray[np.float64]
BATCH_ROWS = 1 << 18
_FILES_AT_ONCE = 64
_OPTIONAL = frozenset({"telemetry", "engine_facts", "checks"})


def find_parts(root: Path) -> list[Path]:
    """Every cell's folder below `root` that holds a complete ingest, in the order of their paths."""
    return sorted(path.parent for path in root.rglob(CELLS.file))


def part_files(parts: Iterable[Path], table: str) -> list[Path]:
    """The files of one table in these parts.

    Raises:
        UserError: no such table, or a part has no file of it (telemetry, engine_facts and checks may be
            missing).
    """
    if table not in TABLES:
        raise UserError(f"no table {table!r}", mend=f"use one of: {', '.join(TABLES)}")
    files = []
    for part in parts:
        folder = part.parent if part.suffix == ".parquet" else part
        path = folder / TABLES[table].file
        if path.is_file():
            files.append(path)
        elif table not in _OPTIONAL:
            raise UserError(f"has no {path.name}", where=str(folder), mend="run the cell's ingest again")
    return files


def open_table(parts: Iterable[Path], table: str) -> ds.Dataset:
    """One table of these parts as a pyarrow dataset; nothing is read yet. Newer columns are null."""
    files = part_files(parts, table)
    schema = TABLES[table].schema
    if not files:
        return ds.dataset(pa.table({f.name: pa.array([], f.type) for f in schema}, schema=schema))
    return ds.dataset([str(path) for path in files], schema=schema, format="parquet")


def cells(parts: Iterable[Path]) -> pa.Table:
    """The cells rows of these parts, in their order."""
    return open_table(parts, "cells").to_table()


def requests(
    parts: Iterable[Path], columns: Sequence[str] | None = None, filter: pc.Expression | None = None
) -> pa.Table:
    """Requests of these parts, failed ones included (`ok` tells them apart).

    Args:
        parts: the cells.
        columns: which columns; all if None.
        filter: a pyarrow expression over any column, as in `pyarrow.compute.field("ok")`.
    """
    return open_table(parts, "requests").to_table(columns=_listed(columns), filter=filter)


def tokens(
    parts: Iterable[Path],
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    *,
    failed: bool = False,
) -> Iterator[pa.RecordBatch]:
    """ITLs of these parts, some rows at a time and in order; memory does not grow with the number of cells.

    Args:
        parts: the cells.
        columns: which columns; all if None.
        filter: a pyarrow expression over any column, as in `pyarrow.compute.field("position") > 1`.
        failed: also the ITLs that failed requests got before they failed.
    """
    if not failed:
        answered = pc.field("ok")
        filter = answered if filter is None else filter & answered
    listed = list(parts)
    for at in range(0, len(listed), _FILES_AT_ONCE):
        # A dataset keeps every footer it has read, so a large one is read as several small ones.
        scanner = open_table(listed[at : at + _FILES_AT_ONCE], "tokens").scanner(
            columns=_listed(columns),
            filter=filter,
            batch_size=BATCH_ROWS,
            batch_readahead=4,
            fragment_readahead=2,
        )
        yield from scanner.to_batches()


def _listed(columns: Sequence[str] | None) -> list[str] | None:
    return None if columns is None else list(columns)


def request_values(parts: Iterable[Path], column: str) -> Floats:
    """One request-level column (`ttft_ms`, `e2e_ms`, ...) of the answered requests, without nulls."""
    table = requests(parts, [column], pc.field("ok"))
    return np.asarray(table[column].drop_null().to_numpy(), dtype=np.float64)


def itl_values(parts: Iterable[Path]) -> Floats:
    """Every ITL (ms) of the answered requests, in memory: for one cell or a few. See `itl_chunks`."""
    chunks = list(itl_chunks(parts)())
    return np.concatenate(chunks) if chunks else np.empty(0)


def itl_chunks(parts: Iterable[Path]) -> Callable[[], Iterator[Floats]]:
    """The same ITLs as a source that `splitbench.statistics.quantiles` can pass over as often as it needs."""
    listed = list(parts)

    def chunks() -> Iterator[Floats]:
        for batch in tokens(listed, ["itl_ms"]):
            if batch.num_rows:
                yield batch.column(0).to_numpy()

    return chunks


def connect(parts: Iterable[Path]) -> Any:
    """A duckdb connection in which each table is a view over these parts' files."""
    import duckdb  # half a second to import, wanted only here

    listed = list(parts)
    connection = duckdb.connect()
    for name in TABLES:
        files = [str(path) for path in part_files(listed, name)]
        if files:
            # One view per table; the list of files is data, never spliced into the statement.
            connection.from_parquet(files, union_by_name=True).create_view(name)
        else:
            connection.from_arrow(open_table([], name).to_table()).create_view(name)
    return connection


def sql(parts: Iterable[Path], statement: str) -> pa.Table:
    """Answer of an SQL statement over the tables `cells`, `requests`, `tokens`, ... of these parts.

    Raises:
        UserError: duckdb refuses the statement.
    """
    import duckdb

    try:
        answer = connect(parts).sql(statement)
        # Statements that select nothing (SET, CREATE ...) answer with None.
        return pa.table({}) if answer is None else answer.to_arrow_table()
    except duckdb.Error as error:
        raise UserError(f"the statement cannot be answered: {error}", where="sql") from error


def clustered_itls(parts: Iterable[Path]) -> Clustered:
    """ITLs of one layout at one load, with the units that vary independently; read anew at every pass.

    Server starts are the units where there are two or more among these cells, else runs, else requests.

    Args:
        parts: the cells of one layout, workload and load.
    """
    listed = list(parts)
    rows = cells(listed)
    starts, level = _units(rows)
    if level == "request":
        return _by_request(listed)
    total = requests(listed, ["ok"], pc.field("ok")).num_rows

    def values() -> Iterator[tuple[Floats, int]]:
        for part, unit in zip(listed, starts, strict=True):
            for batch in tokens([part], ["itl_ms"]):
                if batch.num_rows:
                    yield batch.column(0).to_numpy(), unit

    return Clustered(values, max(starts) + 1, level, total)


def _units(rows: pa.Table) -> tuple[list[int], str]:
    restarts = rows["restart"].to_pylist()
    distinct = list(dict.fromkeys(restarts))
    if len(distinct) >= 2:
        return [distinct.index(r) for r in restarts], "restart"
    return list(range(len(restarts))), "run" if len(restarts) >= 2 else "request"


def _by_request(parts: Sequence[Path]) -> Clustered:
    answered = requests(parts, ["request", "itls"], (pc.field("ok")) & (pc.field("itls") > 0))
    numbers = np.asarray(answered["request"].to_numpy(), dtype=np.int64)
    place = np.zeros(int(numbers.max()) + 1 if len(numbers) else 0, dtype=np.int64)
    place[numbers] = np.arange(len(numbers))

    def values() -> Iterator[tuple[Floats, npt.NDArray[np.int64]]]:
        for batch in tokens(parts, ["request", "itl_ms"]):
            if batch.num_rows:
                yield batch.column(1).to_numpy(), place[batch.column(0).to_numpy()]

    return Clustered(values, len(numbers), "request", len(numbers))


def clustered_requests(parts: Iterable[Path], column: str) -> Clustered:
    """A request-level metric of one layout at one load, with its independent units, as for ITLs."""
    listed = list(parts)
    starts, level = _units(cells(listed))
    per_cell = [request_values([part], column) for part in listed]
    values = np.concatenate(per_cell) if per_cell else np.empty(0)
    if level == "request":
        labels = np.arange(len(values))
    else:
        labels = np.repeat(np.array(starts, dtype=np.int64), [len(v) for v in per_cell])
    return clustered(values, labels, level)
