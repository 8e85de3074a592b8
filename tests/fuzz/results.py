# SPDX-License-Identifier: Apache-2.0
"""Files that a run reads back: the client's result, a cell's records, Parquet parts, and other tools' results."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from splitbench.figures.stage import write_one_figure
from splitbench.measuring.run import CellFiles
from splitbench.report.stage import write_page
from splitbench.statistics.stage import write_statistics
from splitbench.tables import dataset
from splitbench.tables.importers import import_file
from splitbench.tables.ingest import ingest_cell
from splitbench.tables.stage import read_listing, write_cell_part, write_tables
from splitbench.workflow import REPOSITORY, Workflow
from tests.fakes.finished_results import finish, small_config
from tests.fuzz.bending import bent_bytes, bent_json
from tests.fuzz.judging import answered

DETAILED: dict[str, Any] = {
    "model_id": "m",
    "num_prompts": 2,
    "request_rate": "inf",
    "max_concurrency": 4,
    "duration": 0.5,
    "completed": 2,
    "failed": 0,
    "input_lens": [64, 64],
    "output_lens": [3, 3],
    "ttfts": [0.1, 0.2],
    "itls": [[0.01, 0.02], [0.01, 0.02]],
    "latencies": [0.13, 0.23],
    "start_times": [1000.0, 1000.5],
    "generated_texts": ["a", "b"],
    "errors": ["", ""],
}


@functools.cache
def finished() -> tuple[Path, Workflow]:
    """Results of a small experiment, made once a process."""
    folder = Path(tempfile.mkdtemp(prefix="splitbench-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder, finish(folder, small_config(), root=REPOSITORY)


@contextmanager
def with_bytes(path: Path, data: bytes) -> Iterator[None]:
    """A file with other bytes, put back afterwards."""
    sound = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(sound)


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


@given(st.one_of(bent_json(DETAILED).map(as_bytes), bent_bytes(as_bytes(DETAILED))))
def result_file(data: bytes) -> None:
    """The client's own file, as the tables stage and as `splitbench import` read it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        file.write_bytes(data)
        answered(lambda: ingest_cell(file, {"cell_id": "a/b/c1/0-0"}, Path(folder) / "part"), names=str(file))
        answered(
            lambda: list(import_file(file, Path(folder) / "cells", {"experiment": "e"})), names=str(file)
        )


RECORDS = ("bench.json", "metrics.json", "engine_facts.json", "telemetry.json", "record.json", "logs.json.gz")


@given(st.data(), st.sampled_from(RECORDS))
def cell_record(data: st.DataObject, name: str) -> None:
    """One of a cell's files, as the checks and the tables stage read it."""
    folder, flow = finished()
    with chdir(folder):
        cell = flow.cells.ids[0]
        path = CellFiles(Path(flow.path(f"cells/{cell}"))).folder / name
        sound = path.read_bytes()
        if name.endswith(".gz"):
            worse = data.draw(bent_bytes(sound))
        else:
            worse = data.draw(bent_json(json.loads(sound)).map(as_bytes) | bent_bytes(sound))
        with with_bytes(path, worse), tempfile.TemporaryDirectory() as out:
            answered(lambda: write_cell_part(flow, cell, Path(out)))


PARTS = ("cell", "requests", "tokens", "checks", "telemetry")


@given(st.data(), st.sampled_from(PARTS))
def parquet_part(data: st.DataObject, name: str) -> None:
    """One part with damaged bytes, or another table's bytes, under every stage that reads parts."""
    folder, flow = finished()
    with chdir(folder), tempfile.TemporaryDirectory() as out:
        parts = [Path(flow.path(f"parts/{cell}")) for cell in flow.cells.ids]
        path = parts[0] / f"{name}.parquet"
        other = parts[0] / f"{data.draw(st.sampled_from(PARTS))}.parquet"
        worse = data.draw(bent_bytes(path.read_bytes()) | st.just(other.read_bytes()) | st.just(b""))
        target = Path(out)
        cells = Path(flow.path("tables/cells.parquet"))
        stages: list[Callable[[], Any]] = [
            lambda: write_tables(
                parts, target / "cells.parquet", target / "checks.parquet", target / "parts.json"
            ),
            lambda: write_statistics(
                cells, parts, {"itl_ms": 50, "percentile": 99}, target / "statistics.json"
            ),
            lambda: write_one_figure(flow, flow.figure_names[0], parts, target / "figure"),
            lambda: dataset.sql(parts, "select count(*), max(itl_ms) from tokens, requests, cells, checks"),
        ]
        with with_bytes(path, worse):
            answered(data.draw(st.sampled_from(stages)))


DERIVED = ("statistics.json", "tables/parts.json", "check", "probe", "sidecar")


@given(st.data(), st.sampled_from(DERIVED))
def derived_file(data: st.DataObject, name: str) -> None:
    """What the report is made from."""
    folder, flow = finished()
    with chdir(folder), tempfile.TemporaryDirectory() as out:
        path = {
            "check": Path(flow.path(f"environment/check-{flow.stack_key}.json")),
            "probe": Path(flow.path(f"environment/probe-{flow.stack_key}.json")),
            "sidecar": Path(flow.path(f"figures/{flow.figure_names[0]}.json")),
        }.get(name, Path(flow.path(name)))
        sound = path.read_bytes()
        worse = bent_bytes(sound)
        if path.suffix == ".json":
            worse = worse | bent_json(json.loads(sound)).map(as_bytes)
        with with_bytes(path, data.draw(worse)):
            answered(lambda: report_again(flow, Path(out) / "report.html"))


def report_again(flow: Workflow, output: Path) -> None:
    """The report stage as its script calls it."""
    environment = Path(flow.path("environment"))
    write_page(
        flow,
        read_listing(Path(flow.path("tables/parts.json"))),
        environment / f"probe-{flow.stack_key}.json",
        environment / f"check-{flow.stack_key}.json",
        Path(flow.path("statistics.json")),
        "--configfile experiment.yaml",
        output,
    )


TARGETS = {
    "result-file": result_file,
    "cell-record": cell_record,
    "parquet-part": parquet_part,
    "derived-file": derived_file,
}
