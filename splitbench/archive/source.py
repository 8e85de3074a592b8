# SPDX-License-Identifier: Apache-2.0
"""What is archived, where it lies, and where it goes: shared by all that stages an archive's tree."""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import yaml

from splitbench.archive.redact import Redactor
from splitbench.errors import UserError
from splitbench.experiment.load import read_yaml
from splitbench.files import read_json
from splitbench.measuring.run import CellFiles
from splitbench.workflow import Workflow

CONFIG = "experiment.yaml"
CODE_FOLDER = "workflow"


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
        if files.logs.is_file():
            redactor.learn_from_value(orjson.loads(gzip.decompress(files.logs.read_bytes())))
        logs += [source.path(f"logs/cells/{cell.cell_id}{suffix}") for suffix in (".log", ".client.log")]
    for folder in source.session_folders().values():
        documents += sorted(folder.glob("*.json"))
        logs += sorted(folder.glob("*.log"))
    for path in sorted(documents):
        if path.is_file():
            redactor.learn_from_value(orjson.loads(path.read_bytes()))
    for path in (*logs, *source.path("logs/environment").glob("*.log")):
        if path.is_file():
            redactor.learn_from(text_of(path))


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


def archived_flow(tree: Path) -> Workflow:
    """The experiment of an unpacked archive; its paths are relative to `tree`."""
    return Workflow(read_yaml(tree / CONFIG), [Path(CONFIG)], tree / CODE_FOLDER, sources=False)


def logs_of(source: Source) -> Iterator[tuple[str, Path]]:
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


def text_of(path: Path) -> str:
    """A file's text, whatever its bytes; `write_file` gives the same bytes back."""
    return path.read_bytes().decode("utf-8", "surrogateescape")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file of the tree."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    path.write_bytes(data)


def copy_file(path: Path, target: Path) -> None:
    """Copy a result into the tree.

    Raises:
        UserError: it is missing.
    """
    if not path.is_file():
        raise UserError("is missing", where=str(path), mend="run snakemake first")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
