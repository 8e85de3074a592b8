# SPDX-License-Identifier: Apache-2.0
"""RO-Crate metadata of an archive: what it is, what made it, and one action per cell (profile: Workflow Run)."""

from __future__ import annotations

import mimetypes
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from splitbench import __version__
from splitbench.archive.source import CODE_FOLDER, CONFIG
from splitbench.files import read_json, write_json

METADATA = "ro-crate-metadata.json"
VERSION = "1.2"
_PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": ("Process Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/workflow/0.5": ("Workflow Run Crate", "0.5"),
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": ("Workflow RO-Crate", "1.0"),
}
_LICENCE = "https://spdx.org/licenses/Apache-2.0"
_MEDIA = {
    ".parquet": "application/vnd.apache.parquet",
    ".gz": "application/gzip",
    ".yaml": "application/yaml",
}
_WORDS = {
    CONFIG: "The experiment's config, the one file that everything follows from",
    "experiment.resolved.json": "The same config with every default written out",
    "archive.json": "Index of this archive: cells, code, environment, redaction",
    "README.md": "What is in this archive and how to check it, in words",
}


def write_crate(tree: Path, index: Mapping[str, Any]) -> None:
    """Write `ro-crate-metadata.json` for a complete tree.

    Args:
        tree: the crate's root, the payload of the bag.
        index: what `archive.json` holds.
    """
    # Half a second to import, wanted only here.
    from rocrate.model import ComputationalWorkflow, ContextEntity
    from rocrate.model.computerlanguage import get_lang
    from rocrate.rocrate import ROCrate

    crate = ROCrate(version=VERSION)
    snakemake = index["made_with"]["snakemake"]
    results = f"results/{index['experiment']}"
    measured = index["measured"]

    def add(entity_id: str, kind: str | list[str], **properties: Any) -> Any:
        return crate.add(ContextEntity(crate, entity_id, {"@type": kind, **properties}))

    def file(path: str, description: str = "") -> Any:
        found = {"name": path.rsplit("/", 1)[-1], "contentSize": str((tree / path).stat().st_size)}
        found["encodingFormat"] = _media(path)
        if text := description or _WORDS.get(path, ""):
            found["description"] = text
        return crate.add_file(dest_path=path, properties=found)

    licence = file("LICENSE", "Licence") if (tree / "LICENSE").exists() else None
    if licence is None:
        licence = add(
            _LICENCE,
            "CreativeWork",
            name="Apache License 2.0",
            identifier=_LICENCE,
            description="Licence of the workflow's code",
        )
    software = add(
        "#splitbench",
        "SoftwareApplication",
        name="splitbench",
        version=__version__,
        url="https://pypi.org/project/splitbench/",
    )
    root = crate.root_dataset
    root["name"] = f"{index['title']} ({index['experiment']})"
    root["description"] = (
        f"Measurements of a splitbench experiment: {len(index['cells'])} cells, their raw files, tables, figures "
        "and report."
    )
    root["datePublished"] = measured["last"]
    root["license"] = licence
    publisher = add(
        "#author",
        "Organization",
        name="The author of this archive",
        url="https://pypi.org/project/splitbench/",
    )
    root["author"], root["publisher"] = publisher, publisher
    root["conformsTo"] = [
        add(url, ["CreativeWork", "Profile"], name=name, version=version)
        for url, (name, version) in _PROFILES.items()
    ]

    # The library's own add_workflow knows of no Workflow RO-Crate for 1.2; the profile asks for no more than this.
    workflow = crate.add(ComputationalWorkflow(crate, dest_path=f"{CODE_FOLDER}/Snakefile"))
    workflow["programmingLanguage"] = crate.add(get_lang(crate, "snakemake", version=snakemake))
    root["mainEntity"] = workflow
    workflow["name"] = "splitbench"
    workflow["license"] = licence
    workflow["version"] = index["code"]["commit"] or __version__
    workflow["creator"] = publisher
    workflow["description"] = index["code"]["words"]
    workflow["dateCreated"] = measured["first"]
    workflow["encodingFormat"] = "text/plain"

    config = file(CONFIG)
    extras = ("experiment.resolved.json", "archive.json", "README.md", "CITATION.cff")
    for name in extras:
        if (tree / name).exists():
            file(name)
    folders = {
        f"{CODE_FOLDER}/": "Code of the workflow with its locks",
        f"{results}/cells/": "Raw results of every cell, compressed",
        f"{results}/parts/": "A cell's rows of the tables as Parquet",
        f"{results}/logs/": "Logs of sessions, clients and cells, compressed",
    }
    for path, words in folders.items():
        if (tree / path).is_dir():
            crate.add_dataset(
                dest_path=path, properties={"name": path.rstrip("/").rsplit("/", 1)[-1], "description": words}
            )
    names = [str(path.relative_to(tree)) for path in _described(tree / results)]
    entities = {name: file(name) for name in names}
    environment = [entities[name] for name in names if "/environment/" in name]
    outputs = [
        entities[name]
        for name in names
        if name.endswith((".html", ".csv", "statistics.json", "/cells.parquet"))
    ]
    crate.add_action(
        workflow,
        identifier="#run",
        object=[config],
        result=outputs,
        properties={
            "name": f"Run of the workflow for {index['experiment']}",
            "startTime": measured["first"],
            "endTime": measured["last"],
            "actionStatus": "http://schema.org/CompletedActionStatus",
            "agent": publisher,
            "description": "All cells measured, checked, drawn and reported",
        },
    )
    client = add(
        "#client",
        "SoftwareApplication",
        name="vllm bench serve",
        version=str(index["client"]),
        url="https://docs.vllm.ai/",
    )
    for cell in index["cells"]:
        folder = f"{results}/cells/{cell['id']}"
        raw = [
            file(f"{folder}/{name}.json.gz")
            for name in ("bench", "metrics", "engine_facts", "telemetry", "record", "cell")
            if (tree / folder / f"{name}.json.gz").exists()
        ]
        plan = entities.get(f"{results}/plans/{cell['layout']}.json")
        crate.add_action(
            client,
            identifier=f"#cell/{cell['id']}",
            object=[entity for entity in (plan, config, *environment) if entity is not None],
            result=raw,
            properties={
                "name": f"{cell['layout']}, {cell['workload']}, concurrency {cell['concurrency']}, "
                f"run {cell['restart']}-{cell['repeat']}",
                "startTime": cell["started_at"],
                "endTime": cell["ended_at"],
                "actionStatus": "http://schema.org/CompletedActionStatus",
                "agent": software,
                "description": f"One cell, slice digest {cell['digest']}",
            },
        )
    generated = crate.metadata.generate()
    generated["@graph"].sort(key=lambda entity: entity["@id"])
    write_json(tree / METADATA, generated)


def _described(results: Path) -> Iterable[Path]:
    """Files that are described one by one; those of cells and logs are described by their folder and actions."""
    for path in sorted(results.rglob("*")):
        inside = path.relative_to(results).parts[0]
        if path.is_file() and inside not in ("cells", "parts", "logs"):
            yield path


def _media(path: str) -> str:
    suffix = Path(path).suffix
    return _MEDIA.get(suffix) or mimetypes.guess_type(path, strict=True)[0] or "text/plain"


def read_crate(tree: Path) -> dict[str, Any]:
    """The metadata as plain data."""
    return read_json(tree / METADATA)
