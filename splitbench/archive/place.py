# SPDX-License-Identifier: Apache-2.0
"""Where results are looked up: a folder, or an archive that is read member by member."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from splitbench.archive.unpack import opened
from splitbench.errors import UserError

_MOST = 64 << 20


@dataclass(frozen=True)
class Place:
    """Results of one experiment, on disk or in an archive.

    Args:
        name: as a person calls it.
        read: bytes of a file by its path below the results' parent (`results/<experiment>/...`); None: no such file.
        names: all paths.
        config: the config's text and what the file is called; None where it is not known.
    """

    name: str
    read: Callable[[str], bytes | None]
    names: Sequence[str]
    config: tuple[str, str] | None

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object, compressed or not."""
        data = self.read(name)
        found = None if data is None else json.loads(data)
        return found if isinstance(found, dict) else None

    def stored(self, name: str) -> str | None:
        """The path under which a file is there: as it is, or with `.gz`."""
        return next((path for path in (name, f"{name}.gz") if path in self._set), None)

    @cached_property
    def _set(self) -> frozenset[str]:
        return frozenset(self.names)


@contextmanager
def in_archive(path: Path) -> Iterator[Place]:
    """The results inside an archive, read member by member; nothing is unpacked."""
    with opened(path) as archive:
        found = ((info.filename.partition("/data/")[2], info) for info in archive.infolist())
        members = {name: info for name, info in found if name}
        if "archive.json" not in members:
            raise UserError(
                "is no splitbench archive", where=str(path), mend="name the zip of `snakemake archive`"
            )

        def read(name: str) -> bytes | None:
            for stored in (name, f"{name}.gz"):
                if stored in members:
                    return _content(archive, members[stored], stored)
            return None

        text = (read("experiment.yaml") or b"").decode("utf-8", "replace")
        yield Place(str(path), read, sorted(members), (text, "experiment.yaml"))


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> bytes:
    if info.file_size > _MOST:
        raise UserError("is too large to be looked into", where=name)
    with archive.open(info) as source:
        if not name.endswith(".gz"):
            return source.read()
        with gzip.open(source) as packed:
            return packed.read(_MOST)


def on_disk(results: Path, config: Path | None) -> Place:
    """Results in a folder.

    Args:
        results: `.../results/<experiment>`.
        config: the experiment's config, for line numbers.
    """
    base = results.parent.parent

    def read(name: str) -> bytes | None:
        for path in (base / name, base / f"{name}.gz"):
            if path.is_file():
                return path.read_bytes()
        return None

    names = sorted(path.relative_to(base).as_posix() for path in results.rglob("*") if path.is_file())
    found = None
    if config is not None and config.is_file():
        text = config.read_text(encoding="utf-8")
        loaded = yaml.safe_load(text)
        if isinstance(loaded, dict) and loaded.get("experiment") == results.name:
            found = (text, str(config))
    return Place(str(results), read, names, found)


def results_of(file: Path) -> tuple[Path, str]:
    """The folder `results/<experiment>` that a file lies in, and its path below the parent of `results`.

    Raises:
        UserError: it lies in no results folder.
    """
    file = file.absolute()
    for folder in file.parents:
        if folder.parent.name == "results" and (folder / "cells").is_dir():
            return folder, file.relative_to(folder.parent.parent).as_posix()
    raise UserError(
        "lies in no results folder",
        where=str(file),
        mend="name a file below results/<experiment>, or use --in ARCHIVE",
    )
