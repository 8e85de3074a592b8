# SPDX-License-Identifier: Apache-2.0
"""From finished results to one zip: stage, compress, describe, put under digests, pack."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import splitbench
from splitbench.archive.bag import PAYLOAD, pack, write_tags
from splitbench.archive.code import Code, code_of
from splitbench.archive.contents import stage
from splitbench.archive.crate import write_crate
from splitbench.archive.readme import readme
from splitbench.archive.redact import Redactor, of_this_machine
from splitbench.archive.source import CODE_FOLDER, Source, Staged, words_of
from splitbench.files import read_json, write_json, write_text
from splitbench.workflow import Workflow

ARCHIVE_VERSION = 1
INDEX = "archive.json"
# Raw text is compressed as files of its own; tables, figures and the report open as they are.
_COMPRESSED = ("cells", "logs")
_SLICE = 16 << 20


def build_archive(
    flow: Workflow,
    config: Mapping[str, Any],
    argument: str,
    output: Path,
    note: Callable[[str], None] = lambda line: None,
    *,
    folder: Path | None = None,
    known: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write the archive of an experiment whose rules have all run.

    The same results, code and secrets to take out give the same bytes (with the same zlib).

    Args:
        flow: the experiment.
        config: its effective config, as plain data.
        argument: how the experiment is named to snakemake; it is printed in the report.
        output: the zip.
        note: takes lines for a person.
        folder: the folder that the workflow ran in; None: the working folder.
        known: secrets by kind; None: those of this machine.

    Returns:
        the index that the archive holds as `archive.json`.

    Raises:
        UserError: results are missing, or the config is no experiment without its secrets.
    """
    source = Source(flow, config, (folder or Path.cwd()).resolve(), argument)
    redactor = Redactor(of_this_machine() if known is None else known, words_of(flow))
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    code = code_of(flow.root)
    with tempfile.TemporaryDirectory(prefix=".archive-", dir=output.parent) as scratch:
        bag = Path(scratch)
        tree = bag / PAYLOAD
        staged = stage(source, code, redactor, tree, note)
        index = _index(staged, code, redactor, tree)
        write_json(tree / "experiment.resolved.json", staged.flow.experiment.model_dump(mode="json"))
        for name in ("LICENSE", "CITATION.cff"):
            if (tree / CODE_FOLDER / name).is_file():
                shutil.copyfile(tree / CODE_FOLDER / name, tree / name)
        note("archive: compressing the raw files")
        _compress(tree / staged.flow.results)
        write_json(tree / INDEX, index)
        write_text(tree / "README.md", readme(index))
        write_crate(tree, index)
        write_tags(bag, _info(index))
        pack(bag, index["experiment"], output)
    note(f"archive: {output.name}, {output.stat().st_size / 2**20:.1f} MiB")
    return index


def _info(index: Mapping[str, Any]) -> dict[str, str]:
    return {
        "Source-Organization": "splitbench",
        "Bagging-Date": str(index["measured"]["last"])[:10],
        "External-Description": " ".join(str(index["title"]).split()),
        "External-Identifier": str(index["experiment"]),
        "Bag-Software-Agent": f"splitbench {splitbench.__version__}",
        "BagIt-Profile-Identifier": "https://w3id.org/ro/crate/1.2",
    }


def _index(staged: Staged, code: Code, redactor: Redactor, tree: Path) -> dict[str, Any]:
    flow = staged.flow
    cells = []
    for cell in flow.cells.all:
        record = read_json(tree / flow.path(f"cells/{cell.cell_id}/record.json"))
        cells.append(
            {
                "id": cell.cell_id,
                "digest": cell.digest,
                "plan_digest": cell.plan_digest,
                "layout": cell.layout,
                "workload": cell.workload,
                "concurrency": cell.concurrency,
                "restart": cell.restart,
                "repeat": cell.repeat,
                "started_at": record["started_at"],
                "ended_at": record["ended_at"],
                "environment_digest": record["environment_digest"],
                "code_version": record["code_version"],
            }
        )
    probe = flow.path(f"environment/probe-{flow.stack_key}.json")
    serving = read_json(tree / probe)["serving"]
    return {
        "archive_version": ARCHIVE_VERSION,
        "experiment": flow.experiment.experiment,
        "title": flow.experiment.title,
        "splitbench": splitbench.__version__,
        "made_with": {
            name: version(name) for name in ("numpy", "pandas", "pyarrow", "matplotlib", "scipy", "snakemake")
        },
        "client": next((v for k, v in sorted(serving["packages"].items()) if k == "vllm"), "unknown"),
        "measured": {
            "first": min(cell["started_at"] for cell in cells),
            "last": max(cell["ended_at"] for cell in cells),
        },
        "config": {"file": "experiment.yaml", "verbatim": staged.verbatim, "argument": staged.argument},
        "code": {
            "commit": code.commit,
            "changed": list(code.changed) if code.commit else [],
            "words": code.words,
        },
        "environment": {"probe": probe, "serving": flow.path(f"environment/serving-{flow.stack_key}.json")},
        "redaction": {
            "replaced": dict(sorted((k, v) for k, v in redactor.counts.items() if v)),
            "made_again": sorted(set(staged.made_again)),
        },
        "cells": cells,
    }


def _compress(results: Path) -> None:
    paths = [path for name in _COMPRESSED for path in sorted((results / name).rglob("*")) if path.is_file()]
    # zlib works outside the interpreter's lock, so two threads fill two cores; large files first: both end together.
    paths.sort(key=lambda path: (-path.stat().st_size, str(path)))
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(_gzip, paths):
            pass


def _gzip(path: Path) -> None:
    target = path.with_name(f"{path.name}.gz")
    # No name and no time in the header: the same content gives the same bytes.
    with (
        path.open("rb") as source,
        target.open("wb") as out,
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=out, mtime=0) as packed,
    ):
        while chunk := source.read(_SLICE):
            packed.write(chunk)
    path.unlink()
