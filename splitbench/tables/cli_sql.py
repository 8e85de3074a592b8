# SPDX-License-Identifier: Apache-2.0
"""`splitbench sql "select ..."`: ask the tables in SQL."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyarrow as pa

from splitbench.errors import UserError
from splitbench.tables import dataset

HELP = "answer an SQL statement over the tables cells, requests, tokens, telemetry, engine_facts, checks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("statement", help="SQL, as in: select layout, count(*) from cells group by layout")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        help="folder with the cells (default: results)",
    )
    parser.add_argument(
        "--format", choices=("table", "csv", "json"), default="table", help="how the answer is written"
    )
    parser.add_argument("--rows", type=int, default=100, help="rows shown as a table (default: 100)")


def run(args: argparse.Namespace) -> int:
    """Answer on standard output; exit code 0.

    Raises:
        UserError: no cells there, or a statement that duckdb refuses.
    """
    parts = dataset.find_parts(args.results)
    if not parts:
        raise UserError(
            "no ingested cell lies here", where=str(args.results), mend="run a benchmark or an import"
        )
    answer = dataset.sql(parts, args.statement)
    sys.stdout.write(_text(answer, args.format, args.rows))
    return 0


def _text(answer: pa.Table, style: str, rows: int) -> str:
    if style == "csv":
        return str(answer.to_pandas().to_csv(index=False))
    if style == "json":
        return str(answer.to_pandas().to_json(orient="records", lines=True, date_format="iso"))
    if not answer.num_columns:
        return ""
    text = str(answer.slice(0, rows).to_pandas().to_string(index=False))
    hidden = answer.num_rows - rows
    return f"{text}\n... {hidden} more rows\n" if hidden > 0 else f"{text}\n"
