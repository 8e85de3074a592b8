# SPDX-License-Identifier: Apache-2.0
"""The tree inside an archive, staged as a folder in which `snakemake -n` has nothing to do.

Files are copied with their secrets replaced. Where that changes what a cell is keyed by or what a table was read from,
whatever rests on it is made again from the redacted files, by the workflow's own functions; so an archive always agrees
with itself, and its digests are those of what is in it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import yaml

from splitbench.archive.code import Code
from splitbench.archive.redact import Redactor
from splitbench.environment.probe import environment_digest
from splitbench.errors import UserError
from splitbench.experiment.cells import Cell
from splitbench.experiment.load import read_yaml
from splitbench.figures.stage import write_one_figure
from splitbench.figures.writer import SUFFIXES
from splitbench.files import read_json, sha256_file, write_json
from splitbench.measuring.run import CellFiles
from splitbench.report.stage import write_page
from splitbench.statistics.stage import write_statistics
from splitbench.tables.schema import TABLES
from splitbench.tables.stage import write_cell_part, write_tables
from splitbench.workflow import Workflow

CONFIG = "experiment.yaml"
CODE_FOLDER = "workflow"
_LARGE_JSON = 4 << 20
_DATA_URI = re.compile(r"data:[\w/+.-]+;base64,[A-Za-z0-9+/=]*")


@dataclass
class Source:
    """What is archived: an experiment whose rules have all run.

    Args:
        flow: the experiment.
        config: its effective config.
        folder: where its results are, the folder that the workflow ran in.
        argument: how the experiment is named to snakemake; it is printed in the report.
    """

    flow: Workflow
    config: Mapping[str, Any]
    folder: Path
    argument: str

    def path(self, pattern: str) -> Path:
        """A file of the results."""
        return self.folder / self.flow.path(pattern)

    def session_folders(self) -> dict[str, Path]:
        """Folders of the sessions that the cells were measured in, by their path below the results."""
        found = {}
        for cell in self.flow.cells.all:
            folder = self.path(f"cells/{cell.cell_id}")
            session = (folder / read_json(folder / "record.json")["session"]["folder"]).resolve()
            root = self.path("logs/sessions").resolve()
            if session.is_dir() and session.is_relative_to(root):
                found[f"logs/sessions/{session.relative_to(root)}"] = session
        return found


@dataclass
class Staged:
    """The tree as it was staged.

    Attributes:
        flow: the experiment by its redacted config; its paths are relative to the tree.
        argument: how the experiment is named to snakemake, redacted.
        verbatim: whether the config is the user's own file, not a dump of several merged.
        made_again: what had to be made again because of the redaction.
    """

    flow: Workflow
    argument: str
    verbatim: bool
    made_again: list[str] = field(default_factory=list)


def words_of(flow: Workflow) -> list[str]:
    """Names of the experiment, which a user's or host's name may equal by chance."""
    experiment = flow.experiment
    names = [experiment.experiment, experiment.model.name, experiment.stack.name]
    names += [*experiment.layouts, *experiment.workloads, *experiment.figures]
    parts = [part for name in names for part in re.split(r"[^A-Za-z0-9]+", name)]
    return [*names, *parts, "agg", "pd", "prefill", "decode", "proxy", "client", "engine"]


def learn(source: Source, redactor: Redactor, text: str) -> None:
    """Let the redactor see everything that may name a secret, before anything is replaced."""
    redactor.learn_from_value(dict(source.config))
    redactor.learn_from(text)
    documents = [*source.path("environment").rglob("*.json"), *source.path("plans").glob("*.json")]
    logs = []
    for cell in source.flow.cells.all:
        files = CellFiles(source.path(f"cells/{cell.cell_id}"))
        documents += [files.record, files.status]
        logs += [source.path(f"logs/cells/{cell.cell_id}{suffix}") for suffix in (".log", ".client.log")]
    for folder in source.session_folders().values():
        documents += sorted(folder.glob("*.json"))
        logs += sorted(folder.glob("*.log"))
    for path in sorted(documents):
        if path.is_file():
            redactor.learn_from_value(orjson.loads(path.read_bytes()))
    for path in (*logs, *source.path("logs/environment").glob("*.log")):
        if path.is_file():
            redactor.learn_from(_text(path))


def config_text(source: Source) -> tuple[str, bool]:
    """The config as YAML, and whether it is the user's file as it is."""
    for name in reversed(source.flow.files[-1:]):
        for path in (source.folder / name, source.flow.root / name):
            if path.is_file() and len(source.flow.files) == 1 and read_yaml(path) == dict(source.config):
                return path.read_text(encoding="utf-8"), True
    text = yaml.safe_dump(_plain(source.config), sort_keys=False, allow_unicode=True)
    return f"# The effective config: several files or command line values merged.\n{text}", False


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def stage(source: Source, code: Code, redactor: Redactor, tree: Path, note: Callable[[str], None]) -> Staged:
    """Write the whole tree below `tree`, with raw JSON as it is and nothing compressed yet.

    Raises:
        UserError: a result is missing, or the config is no experiment any more without its secrets.
    """
    _all_measured(source)
    text, verbatim = config_text(source)
    learn(source, redactor, text)
    _write(tree / CONFIG, redactor.text(text))
    for name, data in code.files.items():
        _write(tree / CODE_FOLDER / name, _code_file(name, data, redactor))
    _place_lock(source, tree)
    flow = _redacted_flow(source.flow, tree)
    staged = Staged(flow, redactor.text(source.argument), verbatim)
    renames = _renames(source.flow, flow)
    changed = _raw(source, staged, redactor, renames, tree, note)
    with chdir(tree):
        _derived(source, staged, redactor, changed, bool(renames))
    return staged


def _all_measured(source: Source) -> None:
    for cell in source.flow.cells.all:
        files = CellFiles(source.path(f"cells/{cell.cell_id}"))
        for path in (files.bench, files.metrics, files.engine_facts, files.record, files.slice):
            if not path.is_file():
                raise UserError("the cell has not been measured", where=str(path), mend="run snakemake first")


def _place_lock(source: Source, tree: Path) -> None:
    lock = source.flow.experiment.stack.lock
    if lock is None:
        return
    if lock.is_absolute() or ".." in lock.parts:
        raise UserError(
            f"{lock} lies outside the workflow's folder",
            where="stack.lock",
            mend="copy it to envs/ and name it there",
        )
    if not (tree / CODE_FOLDER / lock).exists():
        _write(tree / CODE_FOLDER / lock, (source.flow.root / lock).read_bytes())


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


def archived_flow(tree: Path) -> Workflow:
    """The experiment of an unpacked archive; its paths are relative to `tree`."""
    return Workflow(read_yaml(tree / CONFIG), [Path(CONFIG)], tree / CODE_FOLDER, sources=False)


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
        clean = renamed(_clean(data, path, redactor).decode("utf-8", "surrogateescape"))
        new = clean.encode("utf-8", "surrogateescape")
        _write(tree / staged.flow.path(renamed(name)), new)
        return new != data

    old_flow = source.flow
    for kind in ("serving", "check"):
        name = f"environment/{kind}-{old_flow.stack_key}.json"
        put(source.path(name), name)
    environments = _environments(source, staged, put, tree)
    put(source.path(f"models/{old_flow.model_key}.json"), f"models/{old_flow.model_key}.json")
    for layout in staged.flow.experiment.layouts:
        # Made from the redacted config, so there is nothing left to take out.
        plan = orjson.loads(staged.flow.plan_text(layout))
        write_json(tree / staged.flow.path(f"plans/{layout}.json"), plan)
    changed = set()
    for at, (old, new) in enumerate(zip(old_flow.cells.all, staged.flow.cells.all, strict=True)):
        if at % 16 == 0:
            note(f"archive: cell {at + 1} of {len(old_flow.cells)}")
        if _cell(source, old, new, staged, put, environments, tree):
            changed.add(new.cell_id)
    for name, path in _logs(source):
        put(path, name)
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
    raw = (files.bench, files.metrics, files.engine_facts, files.record, files.status)
    names = [path for path in raw if path.exists()]
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


def _logs(source: Source) -> Iterator[tuple[str, Path]]:
    """Logs that belong to the cells, by their path below the results; absent ones are left out."""
    for cell in source.flow.cells.all:
        for suffix in (".log", ".client.log"):
            path = source.path(f"logs/cells/{cell.cell_id}{suffix}")
            if path.is_file():
                yield f"logs/cells/{cell.cell_id}{suffix}", path
    for name, folder in sorted(source.session_folders().items()):
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.suffix in (".log", ".json", ".yaml"):
                yield f"{name}/{path.name}", path
    for path in sorted(source.path("logs/environment").glob(f"*{source.flow.stack_key}*.log")):
        yield f"logs/environment/{path.name}", path


def _clean(data: bytes, path: Path, redactor: Redactor) -> bytes:
    """A file's bytes without its secrets; the very same bytes where it has none."""
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


def _derived(source: Source, staged: Staged, redactor: Redactor, changed: set[str], renamed: bool) -> None:
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
                    _copy(path, folder / table.file)
    parts = [Path(flow.path(f"parts/{new}")) for _, new in pairs]
    tables = {
        name: Path(flow.path(f"tables/{name}")) for name in ("cells.parquet", "checks.parquet", "parts.json")
    }
    if changed:
        again += ["parts", "tables"]
        write_tables(parts, *tables.values())
    else:
        for name, path in tables.items():
            _copy(source.path(f"tables/{name}"), path)
    statistics = Path(flow.path("statistics.json"))
    if renamed:
        again.append("statistics")
        statistics_of(flow, tables["cells.parquet"], parts, statistics)
    else:
        _copy(source.path("statistics.json"), statistics)
    for name in flow.figure_names:
        if not renamed and _is_clean(source, name, redactor):
            for suffix in SUFFIXES:
                _copy(source.path(f"figures/{name}{suffix}"), Path(flow.path(f"figures/{name}{suffix}")))
        else:
            again.append(f"figures/{name}")
            write_one_figure(flow, name, parts, Path(flow.path(f"figures/{name}")))
    _report(source, staged, redactor, parts)


def _is_clean(source: Source, figure: str, redactor: Redactor) -> bool:
    for suffix in (".json", ".svg"):
        text = _text(source.path(f"figures/{figure}{suffix}"))
        if redactor.text(text) != text:
            return False
    return True


def _report(source: Source, staged: Staged, redactor: Redactor, parts: Sequence[Path]) -> None:
    flow = staged.flow
    page = _text(source.path("report.html"))
    words = _DATA_URI.sub("", page)
    if not staged.made_again and redactor.text(words) == words:
        _write(Path(flow.path("report.html")), page)
        return
    staged.made_again.append("report.html")
    report_of(flow, parts, staged.argument, Path(flow.path("report.html")))


def statistics_of(flow: Workflow, cells: Path, parts: Sequence[Path], output: Path) -> None:
    """The statistics, as the rule makes them."""
    sections = {name: orjson.loads(flow.section(name)) for name in ("slo", "margin_percent", "claims")}
    slo = sections.pop("slo")
    write_statistics(cells, parts, slo, output, **sections)


def report_of(flow: Workflow, parts: Sequence[Path], argument: str, output: Path) -> None:
    """The report, as the rule makes it."""
    probe, check = (
        Path(flow.path(f"environment/{kind}-{flow.stack_key}.json")) for kind in ("probe", "check")
    )
    write_page(flow, parts, probe, check, Path(flow.path("statistics.json")), argument, output)


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogateescape")


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    path.write_bytes(data)


def _copy(path: Path, target: Path) -> None:
    if not path.is_file():
        raise UserError("is missing", where=str(path), mend="run snakemake first")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
