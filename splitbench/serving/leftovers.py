# SPDX-License-Identifier: Apache-2.0
"""What a killed engine leaves on this machine besides processes: sockets, temporary files, shared memory.

Sockets and temporary files go into one short, private folder per session, which is deleted as a whole. Shared memory
has one folder for all programs, so what is ours there is told by who has it mapped: a name is recorded while a process
of the session maps it, with its inode, and only that very file is deleted later.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

# The kernel takes 107 bytes for the path of a Unix socket. The longest name that is put in here is LMCache's
# (engine_<uuid>_dp<N>_service_lookup_lmcache_rpc_port_<engine><rank>): 90 bytes, never shortened by its version 0.3.
# So not in the state folder, whose path the user chooses, and not in TMPDIR.
TEMPORARY = Path(os.sep, "tmp")
_PREFIX = "sb-"

SHARED_MEMORY = Path(os.sep, "dev", "shm")


# -- the session's folder for sockets and temporary files ----------------------------------------------------
def choose_runtime(state: Path, ident: str, temporary: Path = TEMPORARY) -> Path:
    """Name the session's private folder: a short path in `temporary`, or the state folder's where that is not open.

    Args:
        ident: the session's id, hexadecimal.
    """
    if not os.access(temporary, os.W_OK | os.X_OK):
        return _link(state, ident)
    folder = temporary / f"{_PREFIX}{ident[:6]}"
    while os.path.lexists(folder):
        folder = temporary / f"{_PREFIX}{secrets.token_hex(3)}"
    return folder


def make_runtime(state: Path, ident: str, folder: Path) -> None:
    """Make the folder, by whoever holds the state folder's lock: what it finds otherwise is left over.

    A link in the state folder leads to it, made first, so that the next start finds it whatever happens.

    Raises:
        OSError: it can't be made, or is there already and so somebody else's.
    """
    link = _link(state, ident)
    if folder != link:
        link.symlink_to(folder)
    try:
        folder.mkdir(mode=0o700)
    except OSError:
        link.unlink(missing_ok=True)
        raise


def _link(state: Path, ident: str) -> Path:
    return state / f"run-{ident[:8]}"


def remove_runtimes(state: Path, ident: str | None = None) -> None:
    """Delete the folders of sessions that are over, and what leads to them.

    Args:
        ident: only this session's; None: all, none may be up then.
    """
    for link in state.glob(f"run-{ident[:8] if ident else '*'}"):
        if link.is_symlink():
            folder = link.readlink()
            with suppress(OSError):
                facts = folder.lstat()
                ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
                if ours and folder.name.startswith(_PREFIX):
                    shutil.rmtree(folder, ignore_errors=True)
            if not os.path.lexists(folder):
                link.unlink(missing_ok=True)
        else:
            shutil.rmtree(link, ignore_errors=True)


def private_places(runtime: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment that sends a process's sockets and temporary files into the session's folder.

    What is kept between sessions on purpose stays where it was: compiled code would have to be compiled again.
    """
    found = {"TMPDIR": str(runtime), "VLLM_RPC_BASE_PATH": str(runtime)}
    if "TORCHINDUCTOR_CACHE_DIR" not in inherited:
        user = re.sub(r'[\\/:*?"<>|]', "_", _user())
        found["TORCHINDUCTOR_CACHE_DIR"] = str(
            Path(inherited.get("TMPDIR") or TEMPORARY) / f"torchinductor_{user}"
        )
    return found


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, ImportError, OSError):  # a container's user without a name, as PyTorch calls him
        return f"uid_{os.getuid()}"


# -- shared memory -------------------------------------------------------------------------------------------
def segments(folder: Path = SHARED_MEMORY) -> dict[str, int]:
    """This user's files in the folder of shared memory: name and inode."""
    found: dict[str, int] = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                if facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode):
                    found[entry.name] = facts.st_ino
    return found


def mapped(pids: Iterable[int], among: Mapping[str, int], folder: Path = SHARED_MEMORY) -> dict[str, int]:
    """Those of `among` (name and inode) that one of the processes has mapped."""
    if not among:
        return {}
    start = f"{folder}/"
    found: dict[str, int] = {}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            continue
        for line in text.splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(start):
                name = fields[5].removeprefix(start)
                if among.get(name) == int(fields[4]):
                    found[name] = among[name]
    return found


def remove_segments(recorded: Mapping[str, int], folder: Path = SHARED_MEMORY) -> list[str]:
    """Delete recorded segments that are still there; another file under the same name is left alone.

    Returns:
        The names of those deleted.
    """
    here = segments(folder)
    gone = []
    for name in sorted(name for name, inode in recorded.items() if here.get(name) == inode):
        with suppress(OSError):
            (folder / name).unlink()
            gone.append(name)
    return gone
