# SPDX-License-Identifier: Apache-2.0
"""Checking an archive from the outside in: its bytes, then every table from raw, every number from the tables."""

from __future__ import annotations

import filecmp
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from splitbench.archive.bag import PAYLOAD, check_bag, payload_files, write_zip, zip_order
from splitbench.archive.rederive import check_derived
from splitbench.archive.unpack import LIMITS, Limits, gunzip_all, opened, unpack
from splitbench.errors import ARCHIVE, OF_SHAPE, UserError, damage

Say = Callable[[str], None]


@dataclass
class Verdict:
    """What a check found.

    Attributes:
        passed: lines about what holds.
        differs: files and what is wrong with each; empty: the archive is what it says.
    """

    passed: list[str] = field(default_factory=list)
    differs: list[tuple[str, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differs


def verify(path: Path, say: Say = lambda line: None, limits: Limits = LIMITS) -> Verdict:
    """Check an archive; needs no GPU and no serving software.

    Args:
        path: the zip.
        say: takes a line as each stage ends.
        limits: what is unpacked at most.

    Raises:
        UserError: it is no zip, or something in it must not be unpacked.
    """
    verdict = Verdict()
    with unpacked(path, limits) as (bag, broken):
        verdict.differs += broken
        try:
            check_bag(bag, lambda name, what: verdict.differs.append((name, what)))
        except (OSError, ValueError) as error:
            verdict.differs.append((str(path), f"its manifests can't be read ({error})"))
        if verdict.ok:
            verdict.differs += check_container(path, bag)
        if not verdict.ok:
            verdict.differs = _merged(verdict.differs)
            return verdict
        _pass(verdict, f"manifest: {len(payload_files(bag)):,} files are what it says", say)
        try:
            gunzip_all(bag / PAYLOAD / "results", limits)
            for line in check_derived(bag / PAYLOAD, lambda n, w: verdict.differs.append((n, w))):
                _pass(verdict, line, say)
        except (*OF_SHAPE, OSError) as error:
            verdict.differs.append((path.name, f"can't be derived again ({type(error).__name__}: {error})"))
    return verdict


def _pass(verdict: Verdict, line: str, say: Say) -> None:
    verdict.passed.append(line)
    say(line)


def _merged(differs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """One entry per file, the reasons in their order."""
    merged: dict[str, list[str]] = {}
    for name, what in differs:
        merged.setdefault(name, []).append(what)
    return [(name, "; ".join(dict.fromkeys(reasons))) for name, reasons in merged.items()]


@contextmanager
def unpacked(path: Path, limits: Limits = LIMITS) -> Iterator[tuple[Path, list[tuple[str, str]]]]:
    """The bag inside an archive, in a scratch folder, and its members that can't be read."""
    with tempfile.TemporaryDirectory(prefix="splitbench-") as scratch:
        folder = Path(scratch) / "bag"
        folder.mkdir()
        broken = unpack(path, folder, limits)
        tops = sorted(folder.iterdir())
        if len(tops) != 1 or not tops[0].is_dir() or not (tops[0] / PAYLOAD).is_dir():
            raise UserError(
                "is no splitbench archive: one folder with a bag in it is expected",
                where=str(path),
                mend="make one with `snakemake archive`",
            )
        yield tops[0], [(name.partition("/")[2] or name, what) for name, what in broken]


def check_container(path: Path, bag: Path) -> list[tuple[str, str]]:
    """Whether the zip around the members is byte for byte as it is written; else what is touched.

    Members are stored, so the zip follows from their names and bytes alone.
    """
    with tempfile.TemporaryDirectory(prefix="splitbench-") as scratch:
        again = Path(scratch) / "again.zip"
        write_zip(bag, zip_order(payload_files(bag)), bag.name, again)
        if filecmp.cmp(path, again, shallow=False):
            return []
        at = _first_difference(path, again)
        return [(_member_at(again, at), f"the zip around it is altered at byte {at:,}")]


def _first_difference(a: Path, b: Path) -> int:
    at = 0
    with a.open("rb") as left, b.open("rb") as right:
        while True:
            x, y = left.read(1 << 20), right.read(1 << 20)
            if x != y:
                return at + next(
                    (i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y))
                )
            if not x:
                return at
            at += len(x)


DIRECTORY_ENTRY_BYTES = 46
"""Fixed part of an entry in a zip's central directory (APPNOTE 6.3.10, 4.3.12)."""


def _member_at(path: Path, at: int) -> str:
    """The member whose local header or bytes, or entry in the directory at the end, lies at a byte."""
    with opened(path) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        if at < archive.start_dir:
            found = [info for info in infos if info.header_offset <= at]
            return found[-1].filename.partition("/")[2] if found else path.name
        entry = archive.start_dir
        for info in infos:
            entry += DIRECTORY_ENTRY_BYTES + len(info.filename.encode()) + len(info.extra) + len(info.comment)
            if at < entry:
                return info.filename.partition("/")[2]
    return "the zip's end record"


@damage(*ARCHIVE)
def restore(path: Path, folder: Path, limits: Limits = LIMITS) -> Path:
    """Unpack an archive's payload into a new folder, raw files decompressed, so that snakemake can go on.

    Raises:
        UserError: the folder is not empty, or the archive is damaged or unsafe.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError("is not empty", where=str(folder), mend="name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".restore-", dir=folder.parent) as scratch:
        inside = Path(scratch)
        broken = unpack(path, inside, limits)
        tops = sorted(inside.iterdir())
        if broken or len(tops) != 1 or not (tops[0] / PAYLOAD).is_dir():
            name = broken[0][0] if broken else path.name
            raise UserError("is damaged", where=f"{path}: {name}", mend="run `splitbench verify` on it")
        differs: list[tuple[str, str]] = []
        check_bag(tops[0], lambda name, what: differs.append((name, what)))
        if differs:
            raise UserError(
                f"{differs[0][0]} {differs[0][1]}", where=str(path), mend="copy the archive again"
            )
        gunzip_all(tops[0] / PAYLOAD / "results", limits)
        _same_times(tops[0] / PAYLOAD)
        if folder.exists():
            folder.rmdir()
        (tops[0] / PAYLOAD).replace(folder)
    return folder


def _same_times(folder: Path) -> None:
    """One time for all files: none is older than what it was made from, so snakemake finds nothing outdated."""
    now = time.time()
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (now, now))
