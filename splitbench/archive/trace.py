# SPDX-License-Identifier: Apache-2.0
"""Where an artifact comes from: its cells, their raw files, plans and environment, and the config's lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from splitbench.archive.place import Place
from splitbench.environment.probe import environment_digest
from splitbench.errors import ARCHIVE, UserError, damage
from splitbench.files import digest

RAW = (
    "cell.json",
    "bench.json",
    "metrics.json",
    "engine_facts.json",
    "telemetry.json",
    "logs.json.gz",
    "record.json",
)
_WHAT = {
    "figures": "figure",
    "parts": "part of the tables",
    "cells": "raw file of a cell",
    "plans": "launch plan",
    "environment": "record of the machine and its software",
    "models": "record of the model",
    "tables": "table over all cells",
    "logs": "log",
    "report.html": "report",
    "statistics.json": "statistics",
}
# Sections of the config that a kind of artifact depends on beside its cells' own.
_SECTIONS = {
    "figure": ("figures",),
    "report": ("title", "language", "slo", "margin_percent", "claims", "figures"),
    "statistics": ("slo", "margin_percent", "claims"),
    "part of the tables": ("thresholds",),
    "table over all cells": ("thresholds",),
}


@dataclass
class CellTrace:
    """One cell behind an artifact; paths are those in the place, None or absent where there is no such file."""

    id: str
    digest: str | None
    layout: str
    workload: str
    concurrency: int
    raw: list[str]
    parts: list[str]
    plan: str | None
    plan_digest: str | None
    environment: str | None
    environment_digest: str | None
    session_logs: list[str]
    started_at: str | None
    code_version: str | None
    command: list[str]


@dataclass
class Trace:
    """The chain behind an artifact."""

    file: str
    what: str
    place: str
    cells: list[CellTrace]
    config_file: str | None
    config: list[dict[str, Any]]
    facts: dict[str, Any] = field(default_factory=dict)


@damage(*ARCHIVE)
def trace(place: Place, name: str) -> Trace:
    """Trace one file.

    Args:
        place: where the results are.
        name: the file, `results/<experiment>/...`, with or without `.gz`.

    Raises:
        UserError: there is no such file, or it is none that results have.
    """
    stored = place.stored(name)
    if stored is None:
        near = [n for n in place.names if PurePosixPath(n).name == PurePosixPath(name).name]
        raise UserError(
            f"no file {name!r} in {place.name}", mend=f"did you mean {near[0]}?" if near else "check the path"
        )
    path = stored.removesuffix(".gz")
    parts = PurePosixPath(path).parts
    if parts[0] != "results" or len(parts) < 3:
        return _other(place, stored)
    base, kind = "/".join(parts[:2]), parts[2]
    what = _WHAT.get(kind, "file")
    facts: dict[str, Any] = {}
    ids = _cell_ids(place, base)
    if kind == "figures":
        sidecar = place.json(f"{path.rpartition('.')[0]}.json") or {}
        wanted = list(sidecar.get("cells", {}))
        facts = {
            key: sidecar[key]
            for key in ("caption", "spec", "data_sha256", "drawn_with", "code_version")
            if key in sidecar
        }
    elif kind in ("parts", "cells") or path.startswith(f"{base}/logs/cells/"):
        inside = path.removeprefix(f"{base}/logs/cells/").removeprefix(f"{base}/{kind}/")
        wanted = [cell for cell in ids if inside.startswith((f"{cell}/", f"{cell}."))]
    elif kind == "plans":
        wanted = [cell for cell in ids if _layout(place, base, cell) == PurePosixPath(path).stem]
    elif kind == "environment":
        found = _digest(place, path)
        wanted = [cell for cell in ids if _record(place, base, cell).get("environment_digest") == found]
        facts = {"digest": found}
        if not wanted:
            wanted = ids
    elif path.startswith(f"{base}/logs/sessions/"):
        wanted = [cell for cell in ids if path.startswith(_session(place, base, cell))]
    else:
        wanted = ids
    sections = [
        (section, parts[3].partition("-")[0]) if what == "figure" else (section,)
        for section in _SECTIONS.get(what, ())
    ]
    return chain(place, base, stored, what, wanted, sections, facts)


def chain(
    place: Place,
    base: str,
    file: str,
    what: str,
    wanted: Sequence[str],
    sections: Sequence[tuple[str, ...]],
    facts: dict[str, Any],
) -> Trace:
    """The chain behind what rests on `wanted` cells and, beside their own keys, on `sections` of the config."""
    cells = [_cell(place, base, cell) for cell in wanted]
    config = _config(place, sections, cells)
    return Trace(file, what, place.name, cells, place.config and place.config[1], config, facts)


def _other(place: Place, name: str) -> Trace:
    facts = place.json("archive.json") or {}
    kept: dict[str, Any] = {
        key: facts[key] for key in ("code", "measured", "splitbench", "redaction") if key in facts
    }
    what = "code of the workflow" if name.startswith("workflow/") else "file about the archive"
    return Trace(name, what, place.name, [], place.config and place.config[1], [], kept)


def _cell_ids(place: Place, base: str) -> list[str]:
    found = {
        name.removeprefix(f"{base}/cells/").rpartition("/")[0]
        for name in place.names
        if name.startswith(f"{base}/cells/") and PurePosixPath(name.removesuffix(".gz")).name == "record.json"
    }
    return sorted(found)


def _record(place: Place, base: str, cell: str) -> dict[str, Any]:
    return place.json(f"{base}/cells/{cell}/record.json") or {}


def _layout(place: Place, base: str, cell: str) -> str:
    found = place.json(f"{base}/cells/{cell}/cell.json") or {}
    return str(found.get("layout", {}).get("name", ""))


def _session(place: Place, base: str, cell: str) -> str:
    folder = str(_record(place, base, cell).get("session", {}).get("folder", ""))
    inside = folder.partition("logs/sessions/")[2]
    return f"{base}/logs/sessions/{inside}/" if inside else "\0"


def _cell(place: Place, base: str, cell: str) -> CellTrace:
    record, slice_ = _record(place, base, cell), place.json(f"{base}/cells/{cell}/cell.json") or {}
    layout, workload = slice_.get("layout", {}), slice_.get("workload", {})
    session = _session(place, base, cell)
    known = record.get("environment_digest")
    return CellTrace(
        id=cell,
        digest=slice_.get("digest"),
        layout=str(layout.get("name", "")),
        workload=str(workload.get("name", "")),
        concurrency=int(slice_.get("concurrency", 0)),
        raw=[path for name in RAW if (path := place.stored(f"{base}/cells/{cell}/{name}"))],
        parts=[name for name in place.names if name.startswith(f"{base}/parts/{cell}/")],
        plan=place.stored(f"{base}/plans/{layout.get('name')}.json"),
        plan_digest=layout.get("plan_digest"),
        environment=_environment(place, base, known),
        environment_digest=known,
        session_logs=[name for name in place.names if name.startswith(session)],
        started_at=record.get("started_at"),
        code_version=record.get("code_version"),
        command=record.get("client", {}).get("argv", []),
    )


def _digest(place: Place, name: str) -> str:
    record = place.json(name) or {}
    return environment_digest(record) if "machine" in record else digest(record)


def _environment(place: Place, base: str, known: str | None) -> str | None:
    for name in place.names:
        if (
            name.startswith((f"{base}/environment/probe-", f"{base}/environment/kept/"))
            and _digest(place, name) == known
        ):
            return name
    return None


def _config(
    place: Place, sections: Sequence[tuple[str, ...]], cells: Sequence[CellTrace]
) -> list[dict[str, Any]]:
    """Keys of the config that the artifact depends on, with their first and last line."""
    if place.config is None:
        return []
    keys: list[tuple[str, ...]] = [("stack",), ("model",), ("engine",), ("seed",)] if cells else []
    keys += [("layouts", name) for name in dict.fromkeys(cell.layout for cell in cells)]
    keys += [("workloads", name) for name in dict.fromkeys(cell.workload for cell in cells)]
    keys += [("matrix",)] if cells else []
    keys += sections
    text, _ = place.config
    found = []
    for key in keys:
        if (lines := config_lines(text, key)) is not None:
            found.append(
                {
                    "key": ".".join(key),
                    "first": lines[0],
                    "last": lines[1],
                    "text": "\n".join(text.splitlines()[lines[0] - 1 : lines[1]]),
                }
            )
    return found


def config_lines(text: str, key: Sequence[str]) -> tuple[int, int] | None:
    """First and last line (from 1) of a key of a YAML text; None where it is not written."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    first = last = 0
    for part in key:
        if not isinstance(node, yaml.MappingNode):
            return None
        pair = next(((k, v) for k, v in node.value if str(k.value) == part), None)
        if pair is None:
            return None
        first, node = pair[0].start_mark.line + 1, pair[1]
        end = node.end_mark
        # A block ends where the next token begins, everything else on its own last line.
        block = not node.flow_style if isinstance(node, yaml.CollectionNode) else node.style in ("|", ">")
        last = max(first, end.line if block else end.line + 1)
    lines = text.splitlines()
    while last > first and (not lines[last - 1].strip() or lines[last - 1].lstrip().startswith("#")):
        last -= 1
    return first, last


def words(found: Trace) -> str:
    """The chain as a person reads it."""
    lines = [f"{found.file}: {found.what}, in {found.place}"]
    if found.facts.get("number"):
        about = ", ".join(str(part) for part in found.facts["about"])
        lines[0] = f"{found.facts['number']}: {about}, in {found.file} of {found.place}"
    if found.facts.get("says"):
        lines.append(f"  says: {found.facts['says']}")
    if found.facts.get("made_from"):
        lines.append(f"  taken from {found.facts['made_from']}")
    if found.facts.get("caption"):
        lines.append(f"  {found.facts['caption']}")
    if code := found.facts.get("code"):
        lines.append(f"  {code['words']}")
    for item in found.config:
        where = f"{item['first']}" if item["first"] == item["last"] else f"{item['first']}-{item['last']}"
        lines.append(f"  config {found.config_file}:{where}  {item['key']}")
    if not found.config and found.cells:
        lines.append("  config: its file is not known here; name it with --configfile")
    lines.append(f"  rests on {len(found.cells)} cell(s)")
    if left_out := found.facts.get("left_out"):
        lines.append(f"  left out as invalid: {', '.join(left_out)}")
    for cell in found.cells:
        lines.append(f"  cell {cell.id}")
        lines.append(
            f"    slice {_short(cell.digest)}, measured {cell.started_at} by splitbench {cell.code_version}"
        )
        lines.append(f"    plan {cell.plan or 'is not there'} ({_short(cell.plan_digest)})")
        environment = (
            cell.environment
            or "its record is not there: it was measured in another environment than the one kept"
        )
        lines.append(f"    environment {environment} ({_short(cell.environment_digest)})")
        lines += [f"    raw {path}" for path in cell.raw]
        lines += [f"    part {path}" for path in cell.parts]
        lines += [
            f"    log {path}" for path in cell.session_logs if path.removesuffix(".gz").endswith(".log")
        ]
    return "\n".join(lines) + "\n"


def _short(value: str | None) -> str:
    return "no digest" if not value else value[:16]


def as_json(found: Trace) -> str:
    """The chain as JSON."""
    return json.dumps(asdict(found), indent=2, ensure_ascii=False) + "\n"
