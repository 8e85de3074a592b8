# SPDX-License-Identifier: Apache-2.0
"""The tree inside an archive, staged as a folder in which `snakemake -n` has nothing to do.

Files are copied with their secrets replaced. Where that changes what a cell is keyed by or what a table was read from,
whatever rests on it is made again from the redacted files, by the workflow's own functions; so an archive always agrees
with itself, and its digests are those of what is in it.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path

import orjson

from splitbench.archive.code import Code
from splitbench.archive.derived import stage_derived
from splitbench.archive.redact import Redactor
from splitbench.archive.source import (
    CODE_FOLDER,
    CONFIG,
    Source,
    Staged,
    archived_flow,
    config_text,
    learn,
    logs_of,
    write_file,
)
from splitbench.environment.probe import environment_digest
from splitbench.errors import UserError
from splitbench.experiment.cells import Cell
from splitbench.files import read_json, sha256_file, write_json
from splitbench.measuring.run import CellFiles
from splitbench.serving.stage import write_plan
from splitbench.workflow import Workflow

_LARGE_JSON = 4 << 20


def stage(source: Source, code: Code, redactor: Redactor, tree: Path, note: Callable[[str], None]) -> Staged:
    """Write the whole tree below `tree`, with raw JSON as it is and nothing compressed yet.

    Raises:
        UserError: a result is missing, or the config is no experiment any more without its secrets.
    """
    _all_measured(source)
    text, verbatim = config_text(source)
    learn(source, redactor, text)
    write_file(tree / CONFIG, redactor.text(text))
    for name, data in code.files.items():
        write_file(tree / CODE_FOLDER / name, _code_file(name, data, redactor))
    _place_stack_files(source, tree)
    flow = _redacted_flow(source.flow, tree)
    staged = Staged(flow, redactor.text(source.argument), verbatim)
    renames = _renames(source.flow, flow)
    changed = _raw(source, staged, redactor, renames, tree, note)
    with chdir(tree):
        stage_derived(source, staged, redactor, changed, bool(renames))
    return staged


def raw_files(files: CellFiles) -> tuple[Path, ...]:
    """What a measurement leaves, apart from the slice, which the config gives."""
    return (files.bench, files.metrics, files.engine_facts, files.telemetry, files.logs, files.record)


def _all_measured(source: Source) -> None:
    for cell in source.flow.cells.all:
        files = CellFiles(source.path(f"cells/{cell.cell_id}"))
        for path in (*raw_files(files), files.slice):
            if not path.is_file():
                raise UserError("the cell has not been measured", where=str(path), mend="run snakemake first")


def _place_stack_files(source: Source, tree: Path) -> None:
    """The lock, and the file of what the stack expects, where the archive's own workflow looks for them."""
    stack = source.flow.experiment.stack
    for key, path in (("stack.lock", stack.lock), ("stack.expects", stack.expects)):
        if path is None:
            continue
        if path.is_absolute() or ".." in path.parts:
            raise UserError(
                f"{path} lies outside the workflow's folder",
                where=key,
                mend="copy it to envs/ and name it there",
            )
        if not (tree / CODE_FOLDER / path).exists():
            write_file(tree / CODE_FOLDER / path, (source.flow.root / path).read_bytes())


def _redacted_flow(flow: Workflow, tree: Path) -> Workflow:
    try:
        redacted = archived_flow(tree)
    except UserError as error:
        raise UserError(
            f"without its secrets the config can't be read ({error})",
            mend="give secrets by the environment instead of the config",
        ) from None
    for old, new in zip(flow.cells.all, redacted.cells.all, strict=True):
        if old.workload_key != new.workload_key:
            raise UserError(
                "holds a secret, and the prompts' seed depends on it",
                where=f"workloads.{old.workload}",
                mend="give it by the environment instead, and measure again",
            )
    return redacted


def _renames(old: Workflow, new: Workflow) -> dict[str, str]:
    """Keys and digests that are others now because a secret was part of what they are digests of."""
    pairs = [(old.stack_key, new.stack_key), (old.model_key, new.model_key)]
    for a, b in zip(old.cells.all, new.cells.all, strict=True):
        pairs += [(a.layout_key, b.layout_key), (a.digest, b.digest), (a.plan_digest, b.plan_digest)]
        pairs.append((f"{a.layout}-{a.plan_digest[:8]}", f"{b.layout}-{b.plan_digest[:8]}"))
    return {a: b for a, b in pairs if a != b}


def _raw(
    source: Source,
    staged: Staged,
    redactor: Redactor,
    renames: Mapping[str, str],
    tree: Path,
    note: Callable[[str], None],
) -> set[str]:
    """Stage what was measured; ids (new) of the cells of which any file is not as it was."""

    def renamed(text: str) -> str:
        for a, b in renames.items():
            text = text.replace(a, b)
        return text

    def put(path: Path, name: str) -> bool:
        data = path.read_bytes()
        new = _clean(data, path, redactor)
        if renames and not name.endswith(".gz"):
            new = renamed(new.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        write_file(tree / staged.flow.path(renamed(name)), new)
        return new != data

    old_flow = source.flow
    for kind in ("serving", "check"):
        name = f"environment/{kind}-{old_flow.stack_key}.json"
        put(source.path(name), name)
    environments = _environments(source, staged, put, tree)
    put(source.path(f"models/{old_flow.model_key}.json"), f"models/{old_flow.model_key}.json")
    for layout in staged.flow.experiment.layouts:
        # Made from the redacted config, so there is nothing left to take out.
        write_plan(
            staged.flow.plan_text(layout),
            staged.flow.plan_script(layout),
            tree / staged.flow.path(f"plans/{layout}.json"),
            tree / staged.flow.path(f"plans/{layout}.sh"),
        )
    changed = set()
    for at, (old, new) in enumerate(zip(old_flow.cells.all, staged.flow.cells.all, strict=True)):
        if at % 16 == 0:
            note(f"archive: cell {at + 1} of {len(old_flow.cells)}")
        if _cell(source, old, new, staged, put, environments, tree):
            changed.add(new.cell_id)
    for name, path in logs_of(source):
        put(path, name)
    floor = Path(old_flow.floor_path)
    if (source.folder / floor).is_file():
        put(source.folder / floor, str(floor.relative_to(old_flow.results)))
    return changed


def _environments(
    source: Source, staged: Staged, put: Callable[[Path, str], bool], tree: Path
) -> dict[str, str]:
    """Stage the probe, and the records that cells point to; digests before to digests of what is archived."""
    probe = f"environment/probe-{source.flow.stack_key}.json"
    used = {
        read_json(source.path(f"cells/{cell}/record.json"))["environment_digest"]
        for cell in source.flow.cells.ids
    }
    kept = [f"environment/kept/{known[:16]}.json" for known in sorted(used)]
    digests = {}
    for name in (probe, *(name for name in kept if source.path(name).is_file())):
        put(source.path(name), name)
        new = name.replace(source.flow.stack_key, staged.flow.stack_key)
        record = read_json(tree / staged.flow.path(new))
        before, after = environment_digest(read_json(source.path(name))), environment_digest(record)
        digests[before] = after
        if "digest" in record and record["digest"] != after:
            write_json(tree / staged.flow.path(new), record | {"digest": after})
        if name != probe and before != after:
            moved = tree / staged.flow.path(f"environment/kept/{after[:16]}.json")
            (tree / staged.flow.path(new)).replace(moved)
    return digests


def _cell(
    source: Source,
    old: Cell,
    new: Cell,
    staged: Staged,
    put: Callable[[Path, str], bool],
    environments: Mapping[str, str],
    tree: Path,
) -> bool:
    files = CellFiles(source.path(f"cells/{old.cell_id}"))
    here = CellFiles(tree / staged.flow.path(f"cells/{new.cell_id}"))
    names = [path for path in (*raw_files(files), files.status) if path.exists()]
    changes = {path.name: put(path, f"cells/{old.cell_id}/{path.name}") for path in names}
    write_json(here.slice, new.slice | {"digest": new.digest, "experiment": new.experiment})
    record = read_json(here.record)
    stated = dict(record)
    if changes["bench.json"]:
        stated["bench_sha256"] = sha256_file(here.bench)
    stated["environment_digest"] = environments.get(
        record["environment_digest"], record["environment_digest"]
    )
    if stated != record:
        write_json(here.record, stated)
    changes.pop("status.json", None)
    return stated != record or any(changes.values()) or old.cell_id != new.cell_id


def _clean(data: bytes, path: Path, redactor: Redactor) -> bytes:
    """A file's bytes without its secrets; the very same bytes where it has none."""
    if path.name.endswith(".json.gz"):
        inside = gzip.decompress(data)
        clean_inside = _clean(inside, path.with_suffix(""), redactor)
        return data if clean_inside == inside else gzip.compress(clean_inside, mtime=0)
    if path.suffix == ".json" and (path.name == "bench.json" or len(data) > _LARGE_JSON):
        return redactor.json_strings(data)
    if path.suffix == ".json":
        value = orjson.loads(data)
        clean = redactor.value(value)
        if clean == value:
            return data
        return (orjson.dumps(clean, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)) + b"\n"
    text = data.decode("utf-8", "surrogateescape")
    return redactor.text(text).encode("utf-8", "surrogateescape")


def _code_file(name: str, data: bytes, redactor: Redactor) -> bytes:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return data
    # Other experiments' configs are written by users too.
    config = name.startswith("config/") and name.endswith((".yaml", ".yml"))
    return (redactor.text(text) if config else redactor.credentials(text)).encode()
