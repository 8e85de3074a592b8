# SPDX-License-Identifier: Apache-2.0
"""Finding what makes an environment: the Python that a lock was resolved for, and uv."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from splitbench.errors import UserError


def interpreter_for(wanted: str | None, uv: Path | None) -> str:
    """What to make the environment with: this Python if it will do, else one of the wanted version.

    Raises:
        UserError: there is none, and no uv that could look further.
    """
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if wanted is None or wanted == here:
        return sys.executable
    found = next((str(path) for path in _pythons(wanted) if _is_python(path, wanted)), None)
    if found is None and uv is None:
        raise UserError(
            f"the lock is for Python {wanted}, this is {here}",
            mend=f"install python{wanted}, or uv beside it",
        )
    return found or wanted


def _pythons(version: str) -> Iterator[Path]:
    """Interpreters that may be of a version: those on the PATH, then pyenv's own, whose shims run only one of them."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if folder and os.access(path := Path(folder) / f"python{version}", os.X_OK):
            yield path
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(root.glob(f"versions/{version}*/bin/python{version}"), reverse=True)


def _is_python(path: Path, version: str) -> bool:
    """Whether it runs: a shim of pyenv is there for every version, and ends with 127 for those not chosen."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        shown = subprocess.run(
            [str(path), "-I", "-c", program], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return shown.returncode == 0 and shown.stdout.strip() == version


def find_uv() -> Path | None:
    """uv beside this interpreter or on the PATH; None where there is none, and pip has to do."""
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    return Path(found) if found else None
