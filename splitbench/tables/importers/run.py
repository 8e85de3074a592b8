# SPDX-License-Identifier: Apache-2.0
"""Which tool wrote a file, and its import."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from splitbench.errors import UserError
from splitbench.files import sha256_file
from splitbench.tables.bench_serve import MARKS, cell_facts, read_results
from splitbench.tables.cellwriter import CellPaths, write_cell
from splitbench.tables.importers import nvidia, others
from splitbench.tables.importers.common import Imported
from splitbench.tables.ingest import ingest_cell
from splitbench.tables.scan import Source, open_source, scan_object, skip_space
from splitbench.tables.schema import CELLS

Reader = Callable[[Path], Iterator[Imported]]

_READERS: tuple[tuple[frozenset[str], Reader], ...] = (
    (frozenset({"metadata", "metrics"}), nvidia.aiperf_records),
    (frozenset({"service_kind", "experiments"}), nvidia.genai_perf_requests),
    (frozenset({"benchmarks"}), others.guidellm),
    (frozenset({"load_summary", "successes"}), others.inference_perf_summary),
    (frozenset({"hw", "conc", "tput_per_gpu"}), others.inferencex),
    (frozenset({"config", "results", "start_time"}), others.hugging_face),
    (frozenset({"input_config"}), nvidia.summary),
    (frozenset({"request_latency", "request_throughput"}), nvidia.summary),
)
_LIST_READERS: tuple[tuple[frozenset[str], Reader], ...] = (
    (frozenset({"start_time", "end_time", "info"}), others.inference_perf_requests),
    (frozenset({"hw", "conc", "tput_per_gpu"}), others.inferencex),
)


def import_file(
    path: Path, root: Path, identity: Mapping[str, Any] | None = None
) -> list[tuple[str, CellPaths]]:
    """Import a result file of any known tool.

    Args:
        path: the file.
        root: folder of cells; each cell gets `<root>/<cell_id>/`.
        identity: columns of the cells table that the user knows better than the file.

    Returns:
        Id and files of every cell that was found, in the file's order.

    Raises:
        UserError: no known tool's file, or a broken one.
    """
    known = {k: v for k, v in (identity or {}).items() if v is not None}
    unknown = sorted(set(known) - {c.name for c in CELLS.columns})
    if unknown:
        raise UserError(f"no column {unknown[0]} in the cells table", where=str(path))
    reader = reader_of(path)
    sha256 = sha256_file(path)
    if reader is None:
        return _import_bench_serve(path, root, known, sha256)
    cells = []
    try:
        found = list(reader(path))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        tool = reader.__name__.replace("_", " ")
        raise UserError(
            f"looks like a file of {tool}, but is not built like one ({error})", where=str(path)
        ) from error
    if not found:
        raise UserError("holds no result", where=str(path))
    for n, imported in enumerate(found, start=1):
        row = {k: v for k, v in imported.facts.items() if v is not None} | known
        row["cell_id"] = _cell_id(path, sha256, row, n)
        row["source_name"] = path.name if len(found) == 1 else f"{path.name}#{n}"
        row["source_sha256"] = sha256
        cells.append(
            (row["cell_id"], write_cell(imported.requests(), imported.gaps, row, root / row["cell_id"]))
        )
    return cells


def reader_of(path: Path) -> Reader | None:
    """The reader for a file by its first keys; None for the shape of `vllm bench serve`.

    Raises:
        UserError: no known tool writes such a file.
    """
    with open_source(path) as source:
        at = skip_space(source, 3 if source.data[:3] == b"\xef\xbb\xbf" else 0)
        mark = source.data[at : at + 1]
        readers = _READERS
        if mark == b"[":
            readers = _LIST_READERS
            at = skip_space(source, at + 1)
        keys = _first_keys(source, at)
        if mark != b"[" and keys & MARKS and not keys & {"benchmarks", "input_config"}:
            return None
        for wanted, reader in readers:
            if wanted <= keys:
                return reader
        shown = ", ".join(sorted(keys)[:5]) or "no key"
        raise source.error(
            f"no known tool's result: found {shown}",
            mend="known are vllm bench serve, SGLang, AIPerf, GenAI-Perf, guidellm, inference-perf, "
            "InferenceX and inference-benchmarker",
        )


def _first_keys(source: Source, at: int) -> set[str]:
    if source.data[at : at + 1] != b"{":
        raise source.unexpected(at, "a result object, or a list of them,")
    return set(scan_object(source, at)[0])


def _import_bench_serve(
    path: Path, root: Path, known: Mapping[str, Any], sha256: str
) -> list[tuple[str, CellPaths]]:
    with open_source(path) as source:
        stated = [cell_facts(result) for result in read_results(source)]
    cells = []
    for record, facts in enumerate(stated, start=1):
        cell_id = _cell_id(path, sha256, facts | dict(known), record)
        paths = ingest_cell(path, {**known, "cell_id": cell_id}, root / cell_id, record=record)
        cells.append((cell_id, paths))
    return cells


def _cell_id(path: Path, sha256: str, row: Mapping[str, Any], record: int) -> str:
    """A stable id in the form of our own; the file's digest stands for the config that we do not have."""

    def slug(text: str) -> str:
        return re.sub(r"[^A-Za-z0-9._+]+", "-", text).strip("-.") or "x"

    if row.get("concurrency") is not None:
        load = f"c{row['concurrency']}"
    elif row.get("request_rate") is not None:
        load = f"r{row['request_rate']:g}"
    else:
        load = "c0"  # no cap and no rate stated
    layout, workload = slug(str(row.get("layout") or path.stem)), slug(str(row.get("workload") or "imported"))
    return f"{layout}-{sha256[:8]}/{workload}-{sha256[:8]}/{load}/0-{record}"
