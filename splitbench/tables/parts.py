# SPDX-License-Identifier: Apache-2.0
"""Writing one cell's part of a table: typed, with its lineage in the file, complete or absent."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from splitbench import __version__
from splitbench.errors import UserError
from splitbench.files import written_aside
from splitbench.tables import columns
from splitbench.tables.schema import LINEAGE_KEYS, SCHEMA_VERSION, TABLES, Column, Table

ROW_GROUP = 1 << 20
_BATCH = 1 << 15
"""Values of a column that the writer encodes at a time; its default of 1,024 makes ingest a tenth slower."""


def lineage(table: Table, facts: Mapping[str, Any]) -> dict[str, str]:
    """Metadata of a part. `facts` are columns of the cells row by name; what is None is left out."""
    values = {
        "splitbench.table": table.name,
        "splitbench.schema_version": SCHEMA_VERSION,
        "splitbench.ingest_version": __version__,
        **{f"splitbench.{key}": value for key, value in facts.items()},
    }
    return {key: str(values[key]) for key in LINEAGE_KEYS if values.get(key) is not None}


def read_lineage(path: Path) -> dict[str, str]:
    """Lineage of a part by its keys of `LINEAGE_KEYS`; empty if the file is not ours."""
    metadata = pq.read_schema(path).metadata or {}
    return {k.decode(): v.decode() for k, v in metadata.items() if k.startswith(b"splitbench.")}


def _writer_options(table: Table) -> dict[str, Any]:
    options: dict[str, Any] = {"version": "2.6", "compression": "zstd", "compression_level": 1}
    if table.name == "tokens":
        # Latencies hardly compress and their bytes dominate: stored plain they are written and read at memory
        # speed. The other columns are regular enough for the cheapest codec.
        options["compression"] = {c.name: "NONE" if c.name == "itl_ms" else "SNAPPY" for c in table.columns}
        del options["compression_level"]
        options["write_batch_size"] = _BATCH
        options["use_dictionary"] = ["cell_id", "request"]
        options["write_statistics"] = ["request", "itl_ms"]
    return options


@contextmanager
def part_writer(table: Table, path: Path, facts: Mapping[str, Any]) -> Iterator[pq.ParquetWriter]:
    """A Parquet writer whose file appears at `path` only when the block ends without an error."""
    schema = table.schema.with_metadata(lineage(table, facts))
    with written_aside(path) as aside, pq.ParquetWriter(aside, schema, **_writer_options(table)) as writer:
        yield writer


def write_part(
    name: str, rows: pa.Table | Iterable[Mapping[str, Any]], folder: Path, facts: Mapping[str, Any]
) -> Path:
    """Write one cell's rows of a table (also `telemetry`, `engine_facts`, `checks`) into the cell's folder.

    Args:
        name: name of the table.
        rows: an Arrow table, or one mapping per row; `cell_id` may be left out, it comes from `facts`.
        folder: the cell's folder; the file's name is the table's.
        facts: lineage, by column name of the cells table; `cell_id` is required.

    Raises:
        UserError: an unknown column, or a value that does not fit its column's type.
    """
    table = TABLES[name]
    path = folder / table.file
    cell_id = str(facts["cell_id"])
    if not isinstance(rows, pa.Table):
        listed: Sequence[Mapping[str, Any]] = [{"cell_id": cell_id, **row} for row in rows]
        _reject_unknown(table, listed, path)
        rows = pa.Table.from_arrays(
            [_column(c, listed, path, table) for c in table.columns], schema=table.schema
        )
    missing = [c.name for c in table.columns if not c.nullable and rows[c.name].null_count]
    if missing:
        raise UserError(
            f"column {missing[0]} has empty values but needs one in every row", where=f"{path}: {name}"
        )
    with part_writer(table, path, facts) as writer:
        writer.write_table(rows, row_group_size=ROW_GROUP)
    return path


def _column(column: Column, rows: Sequence[Mapping[str, Any]], path: Path, table: Table) -> pa.Array:
    try:
        return columns.from_values([row.get(column.name) for row in rows], column.type)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"a value does not fit: {error}", where=f"{path}: {table.name}.{column.name}"
        ) from error


def _reject_unknown(table: Table, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    known = {c.name for c in table.columns}
    for row in rows:
        unknown = sorted(set(row) - known)
        if unknown:
            raise UserError(
                f"unknown column {unknown[0]}",
                where=f"{path}: {table.name}",
                mend=f"use one of: {', '.join(c.name for c in table.columns)}",
            )


@contextmanager
def folder_of_parts(folder: Path) -> Iterator[Path]:
    """A scratch folder beside `folder`'s files; its files move there together when the block succeeds.

    The file of the cells table moves last, so a folder that has it has the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".ingest.{os.getpid()}"
    scratch.mkdir(exist_ok=True)
    try:
        yield scratch
        done = sorted(scratch.iterdir(), key=lambda p: (p.name == TABLES["cells"].file, p.name))
        for path in done:
            path.replace(folder / path.name)
    finally:
        for path in scratch.iterdir():
            path.unlink()
        scratch.rmdir()
