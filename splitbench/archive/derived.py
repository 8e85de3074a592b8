# SPDX-License-Identifier: Apache-2.0
"""Tables, statistics, figures and report of an archive: copied, or made again where redaction changed something."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import orjson

from splitbench.archive.redact import Redactor
from splitbench.archive.source import Source, Staged, copy_file, text_of, write_file
from splitbench.figures.stage import write_one_figure
from splitbench.figures.writer import SUFFIXES
from splitbench.files import read_json
from splitbench.report.stage import write_page
from splitbench.statistics.stage import write_statistics
from splitbench.tables.schema import TABLES
from splitbench.tables.stage import write_cell_part, write_symmetry, write_tables
from splitbench.workflow import Workflow

_DATA_URI = re.compile(r"data:[\w/+.-]+;base64,[A-Za-z0-9+/=]*")


def stage_derived(
    source: Source, staged: Staged, redactor: Redactor, changed: set[str], renamed: bool
) -> None:
    """Copy tables, statistics, figures and report, or make again what no longer follows from what lies there."""
    flow = staged.flow
    again = staged.made_again
    pairs = list(zip(source.flow.cells.ids, flow.cells.ids, strict=True))
    for old, new in pairs:
        folder = Path(flow.path(f"parts/{new}"))
        if new in changed:
            folder.mkdir(parents=True)
            write_cell_part(flow, new, folder)
        else:
            for table in TABLES.values():
                path = source.path(f"parts/{old}/{table.file}")
                if path.exists():
                    copy_file(path, folder / table.file)
            copy_file(source.path(f"parts/{old}/checks.json"), folder / "checks.json")
    parts = [Path(flow.path(f"parts/{new}")) for _, new in pairs]
    tables = {
        name: Path(flow.path(f"tables/{name}")) for name in ("cells.parquet", "checks.parquet", "parts.json")
    }
    symmetry = Path(flow.path("tables/symmetry.json"))
    if changed:
        again += ["parts", "tables"]
        write_tables(parts, *tables.values())
        write_symmetry(flow, symmetry)
    else:
        for name, path in tables.items():
            copy_file(source.path(f"tables/{name}"), path)
        copy_file(source.path("tables/symmetry.json"), symmetry)
    statistics = Path(flow.path("statistics.json"))
    if renamed:
        again.append("statistics")
        statistics_of(flow, tables["cells.parquet"], parts, statistics)
    else:
        copy_file(source.path("statistics.json"), statistics)
    for name in flow.figure_names:
        if not renamed and _is_clean(source, name, redactor):
            for suffix in SUFFIXES:
                copy_file(source.path(f"figures/{name}{suffix}"), Path(flow.path(f"figures/{name}{suffix}")))
        else:
            again.append(f"figures/{name}")
            write_one_figure(flow, name, parts, Path(flow.path(f"figures/{name}")))
    _report(source, staged, redactor, parts)


def _is_clean(source: Source, figure: str, redactor: Redactor) -> bool:
    for suffix in (".json", ".svg"):
        text = text_of(source.path(f"figures/{figure}{suffix}"))
        if redactor.text(text) != text:
            return False
    return True


def _report(source: Source, staged: Staged, redactor: Redactor, parts: Sequence[Path]) -> None:
    flow = staged.flow
    page = text_of(source.path("report.html"))
    words = _DATA_URI.sub("", page)
    if not staged.made_again and redactor.text(words) == words:
        write_file(Path(flow.path("report.html")), page)
        return
    staged.made_again.append("report.html")
    report_of(flow, parts, staged.argument, Path(flow.path("report.html")))


def statistics_of(flow: Workflow, cells: Path, parts: Sequence[Path], output: Path) -> None:
    """The statistics, as the rule makes them."""
    sections = {name: orjson.loads(flow.section(name)) for name in ("slo", "margin_percent", "claims")}
    slo = sections.pop("slo")
    found = read_json(Path(flow.path("tables/symmetry.json")))["differences"]
    write_statistics(cells, parts, slo, output, asymmetries=found, **sections)


def report_of(flow: Workflow, parts: Sequence[Path], argument: str, output: Path) -> None:
    """The report, as the rule makes it."""
    probe, check = (
        Path(flow.path(f"environment/{kind}-{flow.stack_key}.json")) for kind in ("probe", "check")
    )
    write_page(flow, parts, probe, check, Path(flow.path("statistics.json")), argument, output)
