# SPDX-License-Identifier: Apache-2.0
"""Unpacking an archive that anyone may have made: no path out of the folder, no link, no more than a stated size."""

from __future__ import annotations

import gzip
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from splitbench.errors import UserError

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What is unpacked at most.

    Args:
        files: number of members.
        total_bytes: all members together, decompressed, those inside `.gz` too.
        path: characters of a member's path.
        ratio: bytes that one byte of a compressed member may become, above the first MiB.
    """

    files: int = 200_000
    total_bytes: int = 64 << 30
    path: int = 1024
    ratio: int = 300


LIMITS = Limits()


def member_name(info: zipfile.ZipInfo, archive: Path, limits: Limits) -> PurePosixPath:
    """The member's path, once it is sure that it stays inside and is an ordinary file.

    Raises:
        UserError: it would be written elsewhere, or is a link or a device.
    """
    name = info.filename
    path = PurePosixPath(name)
    parts = name.rstrip("/").split("/")
    where = f"{archive}: {name[:200]!r}"
    if name.startswith(("/", "\\")) or "\\" in name or "\0" in name or ":" in parts[0]:
        raise UserError("a member's path is absolute or not portable; nothing was unpacked", where=where)
    if any(part in ("", ".", "..") for part in parts):
        raise UserError("a member's path leads out of the folder; nothing was unpacked", where=where)
    if len(name) > limits.path or any(len(part.encode()) > 255 for part in parts):
        raise UserError("a member's path is too long; nothing was unpacked", where=where)
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise UserError("a member is a link or a device; nothing was unpacked", where=where)
    if info.flag_bits & 1:
        raise UserError("a member is encrypted; nothing was unpacked", where=where)
    return path


def _members(
    archive: zipfile.ZipFile, path: Path, limits: Limits
) -> list[tuple[zipfile.ZipInfo, PurePosixPath]]:
    infos = archive.infolist()
    if len(infos) > limits.files:
        raise UserError(f"holds {len(infos):,} files, at most {limits.files:,} are unpacked", where=str(path))
    total = sum(info.file_size for info in infos)
    if total > limits.total_bytes:
        raise UserError(
            f"unpacks to {total / 2**30:.1f} GiB, at most {limits.total_bytes / 2**30:.1f} are unpacked",
            where=str(path),
        )
    members = [(info, member_name(info, path, limits)) for info in infos]
    seen: set[str] = set()
    for info, name in members:
        key = str(name).casefold()
        if key in seen:
            raise UserError(f"holds {info.filename!r} twice; nothing was unpacked", where=str(path))
        seen.add(key)
    return [(info, name) for info, name in members if not info.is_dir()]


@contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """A zip for reading.

    Raises:
        UserError: no such file, or it is no zip.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), mend="check the path") from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(
            f"is no readable zip ({error})", where=str(path), mend="copy the archive again"
        ) from None


def unpack(path: Path, folder: Path, limits: Limits = LIMITS) -> list[tuple[str, str]]:
    """Unpack a zip below a folder; all names and sizes are checked before the first byte is written.

    Returns:
        members that can't be read as they stand, with the reason; the others are unpacked.

    Raises:
        UserError: it is no zip, or something in it must not be unpacked.
    """
    broken: list[tuple[str, str]] = []
    with opened(path) as archive:
        left = limits.total_bytes
        for info, name in _members(archive, path, limits):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                left -= _copy(archive, info, target, min(left, info.file_size), limits, path)
            except (zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError) as error:
                broken.append((str(name), f"can't be read from the zip: {error}"))
                _copy_stored(archive, info, target, path)
    return broken


def _copy(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path, most: int, limits: Limits, path: Path
) -> int:
    if info.file_size > max(_CHUNK, info.compress_size * limits.ratio):
        raise UserError(
            "a member is compressed far too well to be honest", where=f"{path}: {info.filename!r}"
        )
    written = 0
    with archive.open(info) as source, target.open("xb") as out:
        while chunk := source.read(_CHUNK):
            written += len(chunk)
            if written > most:
                raise UserError("a member is larger than it states", where=f"{path}: {info.filename!r}")
            out.write(chunk)
    return written


def _copy_stored(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path, path: Path) -> None:
    """What can be had of a stored member whose checksum is wrong, so that the manifest can speak about it."""
    target.unlink(missing_ok=True)
    if info.compress_type != zipfile.ZIP_STORED:
        return
    with path.open("rb") as source:
        source.seek(info.header_offset + 26)
        lengths = source.read(4)
        skip = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        source.seek(info.header_offset + 30 + skip)
        target.write_bytes(source.read(info.compress_size))


def gunzip(path: Path, target: Path, most: int) -> int:
    """Decompress one `.gz` file; the number of bytes.

    Raises:
        UserError: it is damaged, or holds more than `most` bytes.
    """
    written = 0
    try:
        with gzip.open(path) as source, target.open("xb") as out:
            while chunk := source.read(_CHUNK):
                written += len(chunk)
                if written > most:
                    raise UserError("unpacks to more than is allowed", where=str(path))
                out.write(chunk)
    except (OSError, EOFError, zlib.error) as error:
        target.unlink(missing_ok=True)
        raise UserError(f"can't be decompressed ({error})", where=str(path)) from None
    return written


def gunzip_all(folder: Path, limits: Limits = LIMITS) -> None:
    """Decompress every `.gz` below a folder in place, as `gunzip -r` does, within the limits.

    Raises:
        UserError: as `gunzip`.
    """
    left = limits.total_bytes
    for path in sorted(folder.rglob("*.gz")):
        size = path.stat().st_size
        left -= gunzip(path, path.with_suffix(""), min(left, max(_CHUNK, size * 1100)))
        path.unlink()
