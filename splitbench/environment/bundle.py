# SPDX-License-Identifier: Apache-2.0
"""Make an offline bundle: what a GPU node without network lacks, small enough to be carried there.

A bundle is a folder of carries (`carry-1`, `carry-2` ...). Each holds compressed parts, a manifest with their sha256,
and `bootstrap.py`, which needs only Python on the node. What goes in is said by a file below `envs/bundles/`.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splitbench.environment.binaries import keep_architecture, needed_libraries
from splitbench.environment.serving_environment import Locked, read_lock
from splitbench.errors import UserError
from splitbench.files import digest, sha256_file, write_json

MANIFEST = "manifest.json"
MIB = 2**20
_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
# Shared objects get a part each from here on: they are most of the bytes, and parts are packed side by side.
_OWN_PART_BYTES = 24 * MIB
_DICTIONARY_BYTES = 192 * MIB
# What a bundle's folder holds, also after a run that failed.
_OWN = r"carry-\d+|site|parts|wheels"
Progress = Callable[[str], None]


class BundleSpec(BaseModel):
    """What goes into a bundle; paths of locks are relative to the file, patterns to site-packages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    python: str = Field(pattern=r"^3\.\d+$", description="the node's Python")
    platforms: list[str] = Field(min_length=1, description="platform tags whose wheels run on the node")
    gpu_architecture: int | None = Field(None, description="90 for sm_90; None: slim nothing")
    locks: list[Path] = Field(min_length=1)
    present: Path | None = Field(None, description="list of packages that the node has already")
    carry_anyway: list[str] = Field(default_factory=list)
    build_here: list[str] = Field(
        default_factory=list,
        description="packages that come as source only; their wheels must be pure Python",
    )
    later: list[str] = Field(default_factory=list, description="packages that may come in a later carry")
    drop: list[str] = Field(default_factory=list)
    keep_only: dict[str, list[str]] = Field(default_factory=dict)
    needed_only: dict[str, list[str]] = Field(default_factory=dict)
    slim: list[str] = Field(default_factory=list)
    largest_ptx_bytes: int | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    carry_mib: float = Field(gt=1)
    part_mib: float = Field(gt=1)


def read_spec(path: Path) -> BundleSpec:
    """Read what a bundle holds.

    Raises:
        UserError: no such file, or a wrong key.
    """
    try:
        return BundleSpec.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(
            f"can't be read ({error.strerror})", where=str(path), mend="choose a file of envs/bundles"
        ) from None
    except (yaml.YAMLError, ValidationError) as error:
        raise UserError(str(error).splitlines()[0], where=str(path), mend="mend the file") from None


def wanted(spec: BundleSpec, folder: Path) -> list[Locked]:
    """What the node lacks: the locks' requirements, less what is present there, less what is for other machines.

    The first lock that names a package decides on its version.
    """
    from packaging.markers import Marker

    present = _names(folder / spec.present) if spec.present is not None else set()
    target = {
        "implementation_name": "cpython",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "python_full_version": f"{spec.python}.0",
        "python_version": spec.python,
        "sys_platform": "linux",
    }
    chosen: dict[str, Locked] = {}
    for number, lock in enumerate(spec.locks):
        for locked in read_lock(folder / lock):
            marker = re.search(r";\s*(.*?)(?=\s--hash=|$)", locked.text)
            if marker is not None and not Marker(marker[1]).evaluate(target):
                continue
            # The first lock is the serving stack: all of it goes. Of the others, what the node lacks.
            if number and locked.name in present and locked.name not in spec.carry_anyway:
                continue
            chosen.setdefault(locked.name, locked)
    return sorted(chosen.values(), key=lambda locked: locked.name)


def _names(path: Path) -> set[str]:
    lines = (line.split("#", 1)[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {re.sub(r"[-_.]+", "-", re.split(r"[=\s]", line)[0]).lower() for line in lines if line}


def make_bundle(source: Path, out: Path, *, wheels: Path | None, progress: Progress) -> dict[str, Any]:
    """Fetch, unpack, slim and pack; `out` is written anew. Returns the manifest without the list of files.

    Args:
        source: a file of envs/bundles.
        out: folder of the bundle; anything in it but a bundle is an error.
        wheels: folder that holds wheels from an earlier run, or will; None: fetched into `out` and removed.

    Raises:
        UserError: a wheel can't be had, a pattern names nothing, or a carry would be too large.
    """
    spec = read_spec(source)
    if out.exists() and any(re.fullmatch(_OWN, path.name) is None for path in out.iterdir()):
        raise UserError("exists and is no bundle", where=str(out), mend="choose another folder")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    locked = wanted(spec, source.parent)
    folder = wheels or out / "wheels"
    files = _fetch(spec, locked, folder, progress)
    site = out / "site"
    owners = _unpack(files, site)
    report: dict[str, Any] = {"slimmed": {}, "dropped": _drop(spec, site)}
    for pattern in spec.slim if spec.gpu_architecture is not None else []:
        for path in _some(site, pattern):
            assert spec.gpu_architecture is not None
            done = keep_architecture(path, spec.gpu_architecture, largest_ptx=spec.largest_ptx_bytes)
            report["slimmed"][str(path.relative_to(site))] = {
                "kept_bytes": done.kept,
                "blanked_bytes": done.blanked,
            }
            progress(
                f"{path.name}: kept {done.kept / 1e6:.1f} MB of GPU code, blanked {done.blanked / 1e6:.1f}"
            )
    later = {name.replace("-", "_") for name in spec.later}
    parts = _pack(site, owners, later, out / "parts", progress)
    carries = _carries(spec, parts, out)
    manifest = {
        "name": spec.name,
        "python": spec.python,
        "gpu_architecture": spec.gpu_architecture,
        "packages": {one.name: one.version for one in locked},
        "environment": spec.environment,
        "carries": len(carries),
        **report,
    }
    manifest["digest"] = digest(manifest | {"parts": [part.sha256 for part in parts]})
    for number, carry in enumerate(carries, 1):
        place = out / f"carry-{number}"
        place.mkdir()
        for part in carry:
            part.move(place, int(spec.part_mib * MIB))
        shutil.copy(_BOOTSTRAP, place / "bootstrap.py")
        write_json(place / MANIFEST, manifest | {"carry": number, "parts": [part.entry() for part in carry]})
    for name in ("site", "parts", *(() if wheels else ("wheels",))):
        shutil.rmtree(out / name, ignore_errors=True)
    return manifest


def _fetch(spec: BundleSpec, locked: list[Locked], folder: Path, progress: Progress) -> list[Path]:
    """The wheels, from pip's own sources, checked against the locks' hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    progress(f"{len(locked)} wheels into {folder}")
    pip = [sys.executable, "-m", "pip"]
    common = ["--quiet", "--no-deps", "--require-hashes", "--disable-pip-version-check"]
    target = [
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        spec.python,
        "--dest",
        str(folder),
    ]
    target += [text for tag in _older(spec.platforms) for text in ("--platform", tag)]
    source = [one for one in locked if one.name in spec.build_here]
    held = _wheels_in(folder)
    # Built here, a wheel has no hash of the lock; the version in its name must do.
    there = {
        one.name
        for one in locked
        if one.name in held
        and (
            f"-{one.version}-" in held[one.name].name
            if one in source
            else f"sha256:{sha256_file(held[one.name])}" in one.text
        )
    }
    missing = [one for one in locked if one.name not in there]
    if wanted_wheels := [one for one in missing if one not in source]:
        _pip([*pip, "download", *common, *target], wanted_wheels, folder)
    if to_build := [one for one in missing if one in source]:
        _pip([*pip, "wheel", *common, "--wheel-dir", str(folder)], to_build, folder)
    have = _wheels_in(folder)
    for one in locked:
        if one.name not in have:
            raise UserError(
                f"no wheel of {one.name}", where=str(folder), mend="empty the folder and run again"
            )
    for one in source:
        if not have[one.name].name.endswith("-none-any.whl"):
            raise UserError(
                f"{one.name} is not pure Python", where="build_here", mend="find a wheel for the node"
            )
    return [have[one.name] for one in locked]


def _wheels_in(folder: Path) -> dict[str, Path]:
    return {re.sub(r"[-_.]+", "-", path.name.split("-")[0]).lower(): path for path in folder.glob("*.whl")}


def _pip(command: list[str], locked: list[Locked], folder: Path) -> None:
    requirements = folder / "requirements.txt"
    # Markers were decided for the node; pip would decide them for this machine.
    lines = [re.sub(r"\s*;.*?(?=\s--hash=|$)", "", one.text) for one in locked]
    requirements.write_text("\n".join(lines) + "\n", encoding="utf-8")
    ended = subprocess.run([*command, "-r", str(requirements)], capture_output=True, text=True)
    if ended.returncode != 0:
        errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(
            (errors or ended.stderr.splitlines() or ["pip failed"])[-1],
            where=str(requirements),
            mend="mend the lock",
        )


def _older(tags: Iterable[str]) -> list[str]:
    """With manylinux_2_39 every older one, since pip matches exactly what it is given."""
    found = []
    for tag in tags:
        found.append(tag)
        match = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", tag)
        if match is None:
            continue
        found += [f"manylinux_2_{minor}_{match[2]}" for minor in range(int(match[1]) - 1, 4, -1)]
        found += [f"{name}_{match[2]}" for name in ("manylinux2014", "manylinux2010", "manylinux1")]
    return found


def _unpack(wheels: Iterable[Path], site: Path) -> dict[str, str]:
    """Unpack wheels as an installer would, without scripts; returns the package of every file."""
    owners = {}
    for wheel in wheels:
        package = wheel.name.split("-")[0].lower()
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                name = info.filename
                data = re.match(r"[^/]+\.data/([^/]+)/(.+)", name)
                if data is not None:
                    if data[1] not in ("purelib", "platlib"):
                        continue
                    name = data[2]
                target = site / name
                if info.is_dir() or not target.resolve().is_relative_to(site.resolve()):
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(info))
                owners[name] = package
    return owners


def _some(site: Path, pattern: str) -> list[Path]:
    found = sorted(site.glob(pattern))
    if not found:
        raise UserError(f"'{pattern}' names nothing in the wheels", where="bundle", mend="remove or mend it")
    return found


def _drop(spec: BundleSpec, site: Path) -> dict[str, int]:
    """Remove what is not wanted; returns bytes by pattern. A path that names nothing is an error: versions move."""
    dropped = {}

    def remove(paths: Iterable[Path]) -> int:
        size = 0
        for path in paths:
            inside = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
            size += sum(each.stat().st_size for each in inside)
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
        return size

    for pattern in spec.drop:
        general = pattern.startswith("*")  # such a one may well find nothing
        dropped[pattern] = remove(list(site.glob(pattern)) if general else _some(site, pattern))
    for folder, kept in spec.keep_only.items():
        keep = {path for pattern in kept for path in _some(site, f"{folder}/{pattern}")}
        dropped[f"{folder}/*"] = remove(sorted(set((site / folder).iterdir()) - keep))
    for folder, roots in spec.needed_only.items():
        todo = [path for pattern in roots for path in _some(site, pattern) if path.is_file()]
        needed: set[str] = set()
        while todo:
            for name in needed_libraries(todo.pop()):
                if name not in needed and (site / folder / name).exists():
                    needed.add(name)
                    todo.append(site / folder / name)
        unwanted = [
            path for path in (site / folder).glob("*.so*") if path.is_file() and path.name not in needed
        ]
        dropped[f"{folder}/*.so*"] = remove(unwanted)
    return dropped


class _Part:
    """A compressed tar file, on its way into a carry."""

    def __init__(self, path: Path, files: int, later: bool) -> None:
        self.path, self.files, self.later = path, files, later
        self.bytes, self.sha256 = path.stat().st_size, sha256_file(path)
        self.pieces: list[str] = []

    def move(self, place: Path, limit: int) -> None:
        """Into the carry, cut into pieces no longer than `limit` bytes."""
        data = self.path.read_bytes()
        cuts = [data[begin : begin + limit] for begin in range(0, len(data), limit)]
        for number, piece in enumerate(cuts):
            name = self.path.name if len(cuts) == 1 else f"{self.path.name}.{number:02d}"
            (place / name).write_bytes(piece)
            self.pieces.append(name)

    def entry(self) -> dict[str, Any]:
        return {"pieces": self.pieces, "sha256": self.sha256, "bytes": self.bytes, "files": self.files}


def _pack(
    site: Path, owners: Mapping[str, str], later: set[str], out: Path, progress: Progress
) -> list[_Part]:
    """Compress the files in a few tar files: like beside like, the largest shared objects alone."""
    groups: dict[str, list[str]] = {}
    for path in sorted(each for each in site.rglob("*") if each.is_file()):
        name = str(path.relative_to(site))
        shared = ".so" in path.name
        if owners.get(name, "") in later:
            group = "later"
        elif shared and path.stat().st_size >= _OWN_PART_BYTES:
            group = re.sub(r"\W+", "-", path.name.split(".")[0]).strip("-")
        else:
            group = "objects" if shared else "texts"
        groups.setdefault(group, []).append(name)
    out.mkdir(parents=True)

    def pack(item: tuple[str, list[str]]) -> _Part:
        group, names = item
        target = out / f"{group}.tar.xz"
        filters: list[dict[str, Any]] = [{"id": lzma.FILTER_X86}] if group in ("objects", "later") else []
        filters.append({"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": _DICTIONARY_BYTES})
        with lzma.open(target, "wb", check=lzma.CHECK_CRC32, filters=filters) as stream:
            write_tar(site, sorted(names, key=lambda name: (Path(name).suffix, name)), stream)
        part = _Part(target, len(names), group == "later")
        progress(f"{target.name}: {part.files} files, {part.bytes / MIB:.1f} MiB")
        return part

    with ThreadPoolExecutor(max(1, min(2, os.cpu_count() or 1))) as pool:
        return sorted(pool.map(pack, groups.items()), key=lambda part: part.path.name)


def write_tar(site: Path, names: Iterable[str], stream: Any) -> None:
    """A tar file of these files whose bytes depend on their contents and modes only."""
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            path = site / name
            info = tarfile.TarInfo(name)
            info.size, info.mode = path.stat().st_size, 0o644
            with path.open("rb") as handle:
                tar.addfile(info, handle)


def _carries(spec: BundleSpec, parts: list[_Part], out: Path) -> list[list[_Part]]:
    """Share parts out: what is wanted first comes first, largest first, each into the first carry with room."""
    limit = spec.carry_mib * MIB
    carries: list[list[_Part]] = []
    for part in sorted(parts, key=lambda part: (part.later, -part.bytes)):
        if part.bytes > limit:
            raise UserError(
                f"{part.path.name} is {part.bytes / MIB:.1f} MiB, a carry at most {spec.carry_mib:g}",
                where=str(out),
                mend="raise carry_mib, or drop more",
            )
        for carry in carries:
            if sum(other.bytes for other in carry) + part.bytes <= limit:
                carry.append(part)
                break
        else:
            carries.append([part])
    return carries
