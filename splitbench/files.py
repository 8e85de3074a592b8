# SPDX-License-Identifier: Apache-2.0
"""Files that are either complete or absent, and digests that survive a rewrite of the config."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from splitbench.errors import damage


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text whatever order they were written in.

    Raises:
        ValueError: NaN or infinity, which have no JSON form.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """sha256 of the canonical JSON, as 64 hex digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def digest8(value: Any) -> str:
    """First 8 hex digits of `digest`: what paths carry."""
    return digest(value)[:8]


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, as 64 hex digits."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a temporary path in the same folder; rename it onto `path` when the block ends without an error.

    The bytes are on disk before the rename, so a power cut leaves the old file or the new one, never a part.

    Raises:
        OSError: it can't be written; `filename` says which, also where the system leaves that open (a full disk).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(descriptor)
    aside = Path(name)
    try:
        yield aside
        with aside.open("rb") as handle:
            os.fsync(handle.fileno())
        umask = os.umask(0)
        os.umask(umask)
        aside.chmod(0o666 & ~umask)  # mkstemp made it private; results are for sharing
        aside.replace(path)
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write text so that `path` is never seen half-written."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON (sorted keys, two spaces) so that `path` is never seen half-written."""
    write_text(path, json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that this workflow wrote.

    Raises:
        DamagedError: it holds something else by now.
    """
    with damage(str(path), "delete it, and what made it makes it again"):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise TypeError(f"an object is expected, found {type(value).__name__}")
        return value
