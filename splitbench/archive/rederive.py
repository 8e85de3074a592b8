# SPDX-License-Identifier: Apache-2.0
"""Making everything again that follows from the raw files, and naming what comes out differently.

Equal means: texts, counts and keys the same; floating point numbers the same to 1 part in 10^9, since another
processor may round a sum otherwise.
"""

from __future__ import annotations

import html
import io
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from splitbench import __version__
from splitbench.archive.derived import report_of, statistics_of
from splitbench.archive.source import archived_flow
from splitbench.errors import UserError
from splitbench.figures.gallery import Measured, draw_again
from splitbench.figures.writer import read_png_lineage
from splitbench.files import canonical_json, digest, read_json, sha256_file
from splitbench.measuring.run import CellFiles
from splitbench.report.numbers import numbers_of
from splitbench.tables.parts import read_lineage
from splitbench.tables.schema import TABLES
from splitbench.tables.stage import read_listing, write_cell_part, write_symmetry, write_tables
from splitbench.workflow import Workflow

Say = Callable[[str, str], None]
TOLERANCE = 1e-9
_MADE = ("cells", "requests", "tokens", "checks", "engine_facts", "telemetry")
_VERSIONS = ("splitbench.ingest_version",)


def check_derived(tree: Path, say: Say) -> Iterator[str]:
    """Check an unpacked, decompressed tree.

    Args:
        tree: the archive's payload.
        say: takes a file (relative to the tree) and what is wrong with it.

    Yields:
        a line about each stage that holds.
    """
    index = read_json(tree / "archive.json")
    with chdir(tree), tempfile.TemporaryDirectory(prefix="splitbench-") as scratch:
        found: list[tuple[str, str]] = []

        def note(name: str, what: str) -> None:
            found.append((name, what))
            say(name, what)

        def held(line: str) -> Iterator[str]:
            if not found:
                yield line
            found.clear()

        try:
            flow = archived_flow(Path())
        except UserError as error:
            say("experiment.yaml", f"is no experiment ({error})")
            return
        _keys(flow, index, note)
        yield from held(
            f"config: gives the same {len(flow.cells)} cells and {len(flow.experiment.layouts)} plans"
        )
        parts = _parts(flow, Path(scratch), note)
        yield from held(
            f"tables: {parts} Parquet parts of {len(flow.cells)} cells are what their raw files give"
        )
        _tables(flow, Path(scratch), note)
        _statistics(flow, Path(scratch), note)
        yield from held("statistics: every number is what the Parquet parts give")
        _figures(flow, note)
        yield from held(
            f"figures: the data of {len(flow.figure_names)} figures is what the Parquet parts give"
        )
        numbers = _report(flow, index, Path(scratch), note)
        yield from held(f"report: {numbers:,} numbers are what tables, statistics and records give")


def _keys(flow: Workflow, index: dict[str, Any], say: Say) -> None:
    """The config, the cells' slices and the plans agree."""
    if [cell["id"] for cell in index["cells"]] != flow.cells.ids:
        say("archive.json", "lists other cells than the config gives")
    for cell in flow.cells.all:
        files = CellFiles(Path(flow.path(f"cells/{cell.cell_id}")))
        slice_ = {**cell.slice, "digest": cell.digest, "experiment": cell.experiment}
        if read_json(files.slice) != json.loads(json.dumps(slice_)):
            say(str(files.slice), "is not the slice that the config gives")
        record = read_json(files.record)
        if record["cell_digest"] != cell.digest:
            say(str(files.record), "states another digest than the cell's")
        if record["bench_sha256"] != sha256_file(files.bench):
            say(str(files.bench), "is not the file whose digest the cell's record states")
    for layout in flow.experiment.layouts:
        path = Path(flow.path(f"plans/{layout}.json"))
        if read_json(path) != json.loads(flow.plan_text(layout)):
            say(str(path), "is not the plan that the config gives")
        script = path.with_suffix(".sh")
        if script.read_text(encoding="utf-8") != flow.plan_script(layout):
            say(str(script), "is not the script that the config gives")


def _parts(flow: Workflow, scratch: Path, say: Say) -> int:
    count = 0
    for cell in flow.cells.all:
        folder = Path(flow.path(f"parts/{cell.cell_id}"))
        again = scratch / "parts" / cell.cell_id
        again.mkdir(parents=True)
        try:
            write_cell_part(flow, cell.cell_id, again)
        except UserError as error:
            say(flow.path(f"cells/{cell.cell_id}/bench.json"), f"gives no tables ({error.message})")
            continue
        for name in _MADE:
            path = folder / TABLES[name].file
            if not path.is_file():
                say(str(path), "is missing")
                continue
            count += 1
            if difference := parquet_difference(path, again / TABLES[name].file):
                say(str(path), difference)
        for key, old, new in json_differences(
            read_json(folder / "checks.json"), read_json(again / "checks.json")
        ):
            say(str(folder / "checks.json"), f"{key} is {_short(old)}, raw gives {_short(new)}")
        for path in again.iterdir():
            path.unlink()
    return count


def parquet_difference(path: Path, again: Path) -> str | None:
    """How a Parquet file differs from the one that was made again; None where it does not."""
    try:
        stated = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        return f"is no readable Parquet file ({error})"
    made = pq.read_table(again)
    if difference := _table_difference(stated, made):
        return difference
    old, new = read_lineage(path), read_lineage(again)
    for key in sorted(old.keys() | new.keys()):
        if key not in _VERSIONS and old.get(key) != new.get(key):
            return f"its metadata says {key} = {old.get(key)}, the raw file gives {new.get(key)}"
    return None


def _table_difference(stated: pa.Table, made: pa.Table) -> str | None:
    if stated.column_names != made.column_names:
        return f"has the columns {', '.join(stated.column_names)}; raw gives {', '.join(made.column_names)}"
    if stated.num_rows != made.num_rows:
        return f"has {stated.num_rows:,} rows; raw gives {made.num_rows:,}"
    for name in stated.column_names:
        a, b = stated[name], made[name]
        if a.equals(b):
            continue
        if pa.types.is_floating(a.type) and pa.types.is_floating(b.type) and a.is_null().equals(b.is_null()):
            x, y = (np.asarray(c.to_numpy(zero_copy_only=False), dtype=np.float64) for c in (a, b))
            rows = np.flatnonzero(~np.isclose(x, y, rtol=TOLERANCE, atol=0, equal_nan=True))
            if not rows.size:
                continue
            return f"column {name}, row {rows[0]}: {x[rows[0]]!r}, raw gives {y[rows[0]]!r} ({rows.size:,} rows differ)"
        at, old, new = next(
            (i, p, q) for i, (p, q) in enumerate(zip(a.to_pylist(), b.to_pylist(), strict=True)) if p != q
        )
        return f"column {name}, row {at}: {_short(old)}, raw gives {_short(new)}"
    return None


def _tables(flow: Workflow, scratch: Path, say: Say) -> None:
    listed = [str(path) for path in read_listing(Path(flow.path("tables/parts.json")))]
    expected = [flow.path(f"parts/{cell}") for cell in flow.cells.ids]
    if listed != expected:
        say(
            flow.path("tables/parts.json"), "does not list the parts of the experiment's cells in their order"
        )
        return
    made = [scratch / name for name in ("cells.parquet", "checks.parquet", "parts.json")]
    write_tables([Path(folder) for folder in expected], *made)
    write_symmetry(flow, scratch / "symmetry.json")
    symmetry = Path(flow.path("tables/symmetry.json"))
    for key, old, new in json_differences(read_json(symmetry), read_json(scratch / "symmetry.json")):
        say(str(symmetry), f"{key} is {_short(old)}, the records give {_short(new)}")
    for path in made[:2]:
        stated = Path(flow.path(f"tables/{path.name}"))
        if difference := parquet_difference(stated, path):
            say(str(stated), difference.replace("raw gives", "the parts give"))


def _statistics(flow: Workflow, scratch: Path, say: Say) -> None:
    path, again = Path(flow.path("statistics.json")), scratch / "statistics.json"
    parts = [Path(flow.path(f"parts/{cell}")) for cell in flow.cells.ids]
    statistics_of(flow, Path(flow.path("tables/cells.parquet")), parts, again)
    for key, old, new in json_differences(read_json(path), read_json(again)):
        say(str(path), f"{key} is {_short(old)}, the tables give {_short(new)}")


def json_differences(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Places where two JSON values differ, with both values; numbers within the tolerance are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted(a.keys() | b.keys()):
            yield from json_differences(a.get(name), b.get(name), f"{key}.{name}" if key else str(name))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for at, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from json_differences(x, y, f"{key}[{at}]")
    elif isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=TOLERANCE):
        return
    elif a != b:
        yield key, a, b


def _figures(flow: Workflow, say: Say) -> None:
    measured = Measured.from_folders(Path(flow.path(f"parts/{cell}")) for cell in flow.cells.ids)
    for name in flow.figure_names:
        stem = flow.path(f"figures/{name}")
        sidecar = read_json(Path(f"{stem}.json"))
        data = Path(f"{stem}.csv").read_text(encoding="utf-8")
        if sidecar["spec"] != flow.figure_spec(name).model_dump(mode="json"):
            say(f"{stem}.json", "states another spec than the config gives")
            continue
        if sidecar["data_sha256"] != digest(data):
            say(f"{stem}.csv", "is not the data whose digest the sidecar states")
        try:
            drawn = draw_again(measured, sidecar)
        except UserError as error:
            say(f"{stem}.json", f"can't be drawn again ({error.message})")
            continue
        if difference := _csv_difference(data, drawn.data):
            say(f"{stem}.csv", difference)
        for key, new in (("caption", drawn.caption), ("invalid_cells", list(drawn.invalid))):
            if sidecar[key] != new:
                say(f"{stem}.json", f"{key} is not what the tables give: {_short(new)}")
        rows = measured.cells.set_index("cell_id")["cell_digest"]
        if sidecar["cells"] != {cell: rows.get(cell) for cell in drawn.cells}:
            say(f"{stem}.json", "names other cells or digests than the figure shows")
        if read_png_lineage(Path(f"{stem}.png")) != canonical_json(sidecar):
            say(f"{stem}.png", "carries another lineage than the sidecar")


def _csv_difference(stated: str, made: pd.DataFrame) -> str | None:
    again = made.to_csv(index=False, lineterminator="\n")
    if stated == again:
        return None
    old, new = (pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False) for text in (stated, again))
    if list(old.columns) != list(new.columns) or len(old) != len(new):
        return f"has {len(old):,} rows; the tables give {len(new):,}"
    for name in old.columns:
        for at, (x, y) in enumerate(zip(old[name], new[name], strict=True)):
            if x != y and not _close(x, y):
                return f"{name} in line {at + 2} is {x}, the tables give {y}"
    return None


def _close(x: str, y: str) -> bool:
    try:
        return math.isclose(float(x), float(y), rel_tol=TOLERANCE)
    except ValueError:
        return False


def _report(flow: Workflow, index: dict[str, Any], scratch: Path, say: Say) -> int:
    again = scratch / "report.html"
    parts = read_listing(Path(flow.path("tables/parts.json")))
    report_of(flow, parts, index["config"]["argument"], again)
    path = flow.path("report.html")
    old, new = (page_lines(Path(name).read_text(encoding="utf-8")) for name in (path, again))
    numbers = sum(len(_NUMBER.findall(line)) for line in old)
    if index["splitbench"] != __version__:
        # Another version words its page otherwise; its numbers must still all be there.
        old, new = ([n for line in lines for n in _NUMBER.findall(line)] for lines in (old, new))
        old = [number for number in old if number not in (index["splitbench"], __version__)]
        new = [number for number in new if number not in (index["splitbench"], __version__)]
    texts = (Path(path).read_text(encoding="utf-8"), again.read_text(encoding="utf-8"))
    stated, made = ({name: found.of for name, found in numbers_of(text).items()} for text in texts)
    if stated and index["splitbench"] == __version__ and stated != made:  # older pages give no ids
        say(path, "gives its numbers other ids than tables and records do")
    if old != new:
        at = next(
            (i for i, (x, y) in enumerate(zip(old, new, strict=False)) if x != y), min(len(old), len(new))
        )
        shown = [_short(lines[at]) if at < len(lines) else "nothing" for lines in (old, new)]
        say(path, f"says {shown[0]} where tables and records give {shown[1]}")
    return numbers


_NUMBER = re.compile(r"\d[\d.,]*\d|\d")
_IMAGES = re.compile(r"data:image/[\w+]+;base64,([A-Za-z0-9+/=]*)")
_TITLES = re.compile(r' (?:title|alt)="(?!n-[0-9a-f]{10}")([^"]*)"')
_TAGS = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL)


def page_lines(page: str) -> list[str]:
    """The text of a page, a line per element, what shows where the pointer rests, and a digest for each image."""
    page = _IMAGES.sub(lambda match: f">\nimage {digest(match[1])[:16]}\n<", page)
    text = html.unescape(_TAGS.sub("\n", page) + "\n" + "\n".join(_TITLES.findall(page)))
    return [line for raw in text.splitlines() if (line := " ".join(raw.split()))]


def _short(value: Any, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
