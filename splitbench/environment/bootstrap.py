# SPDX-License-Identifier: Apache-2.0
"""Unpack an offline bundle on a node without network: python3 bootstrap.py FOLDER [CARRY ...]

FOLDER becomes an environment with an interpreter of its own (FOLDER/bin/python) that sees the bundle's packages first
and this Python's after them. Carries may come one by one; a part that is there already is not unpacked again.
Needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import compileall
import concurrent.futures
import hashlib
import io
import json
import os
import platform
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
RECORD = "bundle.json"


class BundleError(Exception):
    """What is wrong with the bundle or the node, in one line."""


def site_of(folder: Path) -> Path:
    """site-packages of the environment."""
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def make_environment(folder: Path) -> None:
    """An interpreter of its own that sees this Python's packages too, as `venv` would make it (PEP 405).

    Done by hand, since distributions leave `venv` out of their smallest Python. This Python may be in a virtual
    environment itself: its site-packages are named by a .pth file, so that they come after the bundle's.
    """
    base = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    site = site_of(folder)
    site.mkdir(parents=True, exist_ok=True)
    for name in ("python", "python3"):
        link = folder / "bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to(base)
    (folder / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = false\nversion = {platform.python_version()}\n",
        encoding="utf-8",
    )
    # Where this Python's own packages lie, its virtual environment's before the system's.
    seen = dict.fromkeys(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    lines = [f"import site; site.addsitedir({path!r})\n" for path in seen if Path(path) != site]
    (site / "_node_packages.pth").write_text("".join(lines), encoding="utf-8")


def unpack(pieces: list[str], sha256: str, target: str) -> str:
    """Unpack one part after its sum was checked; returns the sum."""
    data = b"".join(Path(piece).read_bytes() for piece in pieces)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise BundleError(
            f"{pieces[0]}: damaged (sha256 {found[:12]}, expected {sha256[:12]}); copy it again"
        )
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as tar:
        # All of them before the first is written; the filter alone, where Python has it, stops half-way.
        for member in tar.getmembers():
            _stays_inside(member, pieces[0])
        if hasattr(tarfile, "data_filter"):
            tar.extractall(target, filter="data")
        else:
            tar.extractall(target)
    return sha256


def _stays_inside(member: tarfile.TarInfo, piece: str) -> None:
    """Refuse what would be written, or would point, outside of the folder, and what is no file, folder or link.

    Raises:
        BundleError: it is such a member.
    """
    names = [Path(member.name)]
    if member.issym():
        names.append(Path(member.name).parent / member.linkname)
    elif member.islnk():
        names.append(Path(member.linkname))
    elif not (member.isreg() or member.isdir()):
        raise BundleError(f"{piece}: {member.name!r} is no ordinary file; make the bundle again")
    for name in names:
        if name.is_absolute() or Path(os.path.normpath(name)).parts[:1] == ("..",):
            raise BundleError(f"{piece}: {member.name!r} leads out of the folder; make the bundle again")


def bootstrap(folder: Path, carries: list[Path]) -> dict[str, Any]:
    """Unpack carries into `folder`; returns the record, whose `missing` says how many carries are still wanted.

    Raises:
        BundleError: another Python than the bundle is for, a damaged part, parts of two bundles.
    """
    began = time.monotonic()
    record_path = folder / RECORD
    record: dict[str, Any] = json.loads(record_path.read_text()) if record_path.exists() else {}
    wanted = []
    for carry in carries:
        try:
            manifest = json.loads((carry / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BundleError(f"{carry}: no carry of a bundle ({error})") from None
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        if manifest["python"] != here:
            raise BundleError(f"{carry}: made for Python {manifest['python']}, this is {here}")
        if record and record["digest"] != manifest["digest"]:
            raise BundleError(f"{carry}: of another bundle than what {folder} holds; choose a new folder")
        if not record:
            kept = {key: value for key, value in manifest.items() if key not in ("carry", "parts")}
            record = kept | {"unpacked": [], "carries_here": [], "seconds": 0.0}
        record["carries_here"] = sorted({*record["carries_here"], manifest["carry"]})
        wanted += [
            ([str(carry / piece) for piece in part["pieces"]], part["sha256"])
            for part in manifest["parts"]
            if part["sha256"] not in record["unpacked"]
        ]
    if not record:
        raise BundleError("no carry given and none here")
    if not (folder / "bin" / "python").exists():
        make_environment(folder)
    site = site_of(folder)
    if wanted:
        with concurrent.futures.ProcessPoolExecutor(min(len(wanted), os.cpu_count() or 1)) as pool:
            jobs = [pool.submit(unpack, pieces, sha256, str(site)) for pieces, sha256 in wanted]
            record["unpacked"] += [job.result() for job in jobs]
        # Bytecode now, or every first import pays for it; a file that does not compile is nobody's import.
        compileall.compile_dir(str(site), quiet=2, workers=0)
    variables = {
        name: value.replace("{folder}", str(folder)) for name, value in record["environment"].items()
    }
    (folder / "environment.sh").write_text(
        "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()),
        encoding="utf-8",
    )
    record["missing"] = record["carries"] - len(record["carries_here"])
    record["seconds"] = round(record["seconds"] + time.monotonic() - began, 1)
    aside = record_path.with_suffix(".tmp")
    aside.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    aside.rename(record_path)
    return record


def check_imports(folder: Path, modules: list[str]) -> list[str]:
    """Modules that the environment's interpreter can't import, each with its error."""
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n"
        "    except Exception as error: print(f'{name}: {type(error).__name__}: {error}')\n"
    )
    shown = subprocess.run(
        [str(folder / "bin" / "python"), "-c", program, *modules], capture_output=True, text=True, check=False
    )
    failed = shown.stdout.splitlines()
    return failed if shown.returncode == 0 else [*failed, f"python ended with {shown.returncode}"]


def main(arguments: list[str] | None = None) -> int:
    """Unpack, say what is there; exit code 1 with one line when it can't be done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("carries", type=Path, nargs="*", help="default: the one that this script lies in")
    parser.add_argument("--check", nargs="*", metavar="MODULE", help="then import these")
    options = parser.parse_args(arguments)
    carries = options.carries or [Path(__file__).resolve().parent]
    try:
        record = bootstrap(options.folder.absolute(), carries)
    except BundleError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    missing = (
        f", {record['missing']} of {record['carries']} carries still missing" if record["missing"] else ""
    )
    sys.stdout.write(f"{record['name']} in {options.folder} after {record['seconds']} s{missing}\n")
    failed = check_imports(options.folder.absolute(), options.check) if options.check else []
    for line in failed:
        sys.stderr.write(f"error: {line}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
