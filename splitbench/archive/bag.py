# SPDX-License-Identifier: Apache-2.0
"""The BagIt layout (RFC 8493) and the zip around it, both written in one way only, so that any other byte shows.

Members are stored, not deflated: what is worth compressing is compressed as a file of its own (`.gz`), so every byte of
it is under a digest of the manifest. A deflated member has bits that no digest covers.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from splitbench.files import sha256_file, written_aside

BAGIT = "BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n"
MANIFEST = "manifest-sha256.txt"
TAG_MANIFEST = "tagmanifest-sha256.txt"
TAGS = ("bag-info.txt", "bagit.txt", MANIFEST)
PAYLOAD = "data"
_WHEN = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16


def payload_files(bag: Path) -> list[str]:
    """Payload files of an unpacked bag, as sorted paths below it (`data/...`)."""
    found = (path for path in (bag / PAYLOAD).rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path.relative_to(bag).as_posix() for path in found)


def digests(bag: Path, names: Sequence[str]) -> dict[str, str]:
    """sha256 of files of a bag, by path."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(lambda name: sha256_file(bag / name), names), strict=True))


def manifest_text(found: Mapping[str, str]) -> str:
    """A manifest's text: a line per file, sorted by path."""
    return "".join(f"{sha256}  {_escaped(name)}\n" for name, sha256 in sorted(found.items()))


def read_manifest(text: str) -> dict[str, str]:
    """Digest by path of a manifest; lines that are none are left out and make the text differ from its own."""
    found = {}
    for line in text.splitlines():
        sha256, _, name = line.partition("  ")
        if name:
            found[name.replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")] = sha256
    return found


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("\n", "%0A").replace("\r", "%0D")


def write_tags(bag: Path, info: Mapping[str, str]) -> None:
    """Write the tag files of a bag whose payload is complete.

    Args:
        bag: the bag's folder.
        info: lines of bag-info.txt, in their order; the payload's size is added.
    """
    names = payload_files(bag)
    size = sum((bag / name).stat().st_size for name in names)
    lines = {**info, "Payload-Oxum": f"{size}.{len(names)}"}
    (bag / "bagit.txt").write_text(BAGIT, encoding="utf-8")
    text = "".join(f"{key}: {value}\n" for key, value in lines.items())
    (bag / "bag-info.txt").write_text(text, encoding="utf-8")
    (bag / MANIFEST).write_text(manifest_text(digests(bag, names)), encoding="utf-8")
    tags = {name: hashlib.sha256((bag / name).read_bytes()).hexdigest() for name in TAGS}
    (bag / TAG_MANIFEST).write_text(manifest_text(tags), encoding="utf-8")


def write_zip(bag: Path, names: Iterable[str], top: str, path: Path) -> None:
    """Write files of a bag as a zip of stored members below the folder `top`; the same files give the same bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name in names:
            member = zipfile.ZipInfo(f"{top}/{name}", _WHEN)
            member.create_system, member.create_version, member.extract_version = 3, 20, 20
            member.external_attr = _MODE
            member.file_size = (bag / name).stat().st_size
            with (bag / name).open("rb") as source, archive.open(member, "w") as target:
                shutil.copyfileobj(source, target, 1 << 20)


def zip_order(payload: Iterable[str]) -> list[str]:
    """Members in the order that they are written: what says what this is comes first."""
    return [*("bagit.txt", "bag-info.txt", MANIFEST, TAG_MANIFEST), *sorted(payload)]


def pack(bag: Path, top: str, path: Path) -> None:
    """Write a complete bag as a zip, which is there as a whole or not at all."""
    with written_aside(path) as aside:
        write_zip(bag, zip_order(payload_files(bag)), top, aside)


def check_bag(bag: Path, say: Callable[[str, str], None]) -> None:
    """Compare every file of an unpacked bag with the manifests, and the manifests with the way they are written.

    Args:
        bag: the bag's folder.
        say: takes a file's path and what is wrong with it.
    """
    names = payload_files(bag)
    for name in (*TAGS, TAG_MANIFEST):
        if not (bag / name).is_file():
            say(name, "is missing")
            return
    _compare(read_manifest(_text(bag / MANIFEST)), digests(bag, names), "its manifest", say)
    _compare(read_manifest(_text(bag / TAG_MANIFEST)), digests(bag, TAGS), "the tag manifest", say)
    for name in (MANIFEST, TAG_MANIFEST):
        if _text(bag / name) != manifest_text(read_manifest(_text(bag / name))):
            say(name, "is not as this version writes a manifest")
    if _text(bag / "bagit.txt") != BAGIT:
        say("bagit.txt", "is not as this version writes it")


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")


def _compare(
    stated: Mapping[str, str], found: Mapping[str, str], where: str, say: Callable[[str, str], None]
) -> None:
    for name in sorted(stated.keys() | found.keys()):
        if name not in found:
            say(name, f"is missing, but {where} lists it")
        elif name not in stated:
            say(name, f"is not in {where}")
        elif stated[name] != found[name]:
            say(
                name, f"is not what {where} says: sha256 {found[name][:16]}..., stated {stated[name][:16]}..."
            )
