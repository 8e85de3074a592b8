# SPDX-License-Identifier: Apache-2.0
"""The node's state: who measures now, which session is up, which plans failed to start.

One folder per user and node, private to the user. It is small, and all of it may be lost: what is running is
then found again by the marks that engines carry.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitbench.errors import UserError
from splitbench.files import digest8, read_json, write_json
from splitbench.serving.processes import ProcessId

OWNER_VARIABLE = "SPLITBENCH_OWNER"
FOLDER_VARIABLE = "SPLITBENCH_STATE"

# A Unix socket's path holds 107 bytes; the longest name that is put behind the folder needs about 25.
_LONGEST_FOLDER = 80
_ANNOUNCE_EVERY_S = 60.0


@dataclass(frozen=True)
class Owner(ProcessId):
    """The process whose life a session must not outlast: the top snakemake of a workflow."""

    @classmethod
    def current(cls) -> Owner:
        """The calling process as owner."""
        me = ProcessId.current()
        return cls(me.pid, me.started)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Owner | None:
        """Read SPLITBENCH_OWNER ("pid:starttime", as `str(owner)` writes it); None when it is not set.

        Raises:
            UserError: it is set to something else.
        """
        text = environ.get(OWNER_VARIABLE)
        if not text:
            return None
        try:
            found = ProcessId.parse(text)
        except ValueError:
            raise UserError(
                f"{text!r} is not a process and its start time",
                where=OWNER_VARIABLE,
                mend="leave it unset; the Snakefile sets it",
            ) from None
        return cls(found.pid, found.started)


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of this user's sessions on this node, made where it is missing.

    `$SPLITBENCH_STATE`, else `splitbench-<uid>` in the system's folder for temporary files. Neither TMPDIR
    nor XDG_RUNTIME_DIR is followed: both differ between the shells, jobs and services of one user, and the
    latter is deleted at log-out, under a run that was left to itself; the lock of the node must be the same
    file for all.

    Raises:
        UserError: the folder belongs to somebody else, is open to others, or its path is too long.
    """
    variables = os.environ if environ is None else environ
    given = variables.get(FOLDER_VARIABLE)
    folder = Path(given).absolute() if given else Path(os.sep, "tmp", f"splitbench-{os.getuid()}")
    mend = f"set {FOLDER_VARIABLE} to a private folder on this node, with a short path"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if given:
            folder = folder.resolve()  # the user's own link; in a folder open to all it could be anybody's
        facts = folder.lstat()
    except OSError as error:
        raise UserError(f"can't be made: {error.strerror}", where=str(folder), mend=mend) from error
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        raise UserError(f"the path is longer than {_LONGEST_FOLDER} bytes", where=str(folder), mend=mend)
    if not stat.S_ISDIR(facts.st_mode):
        raise UserError("is not a folder", where=str(folder), mend=mend)
    if facts.st_uid != os.getuid():
        raise UserError("belongs to another user", where=str(folder), mend=mend)
    if stat.S_IMODE(facts.st_mode) & 0o077:
        if given:
            raise UserError(
                "is open to other users", where=str(folder), mend=f"chmod 700 {folder}, or {mend}"
            )
        folder.chmod(0o700)
    return folder


def supervisor_socket(state: Path) -> Path:
    """Where the supervisor listens."""
    return state / "supervisor.sock"


def supervisor_lock(state: Path) -> Path:
    """Locked (flock) by the supervisor as long as it lives, however it dies."""
    return state / "supervisor.lock"


def session_record(state: Path) -> Path:
    """What is known of the session that is up or was the last one."""
    return state / "session.json"


def progress_record(state: Path) -> Path:
    """Where the cell that is being measured is."""
    return state / "progress.json"


def read_record(path: Path) -> dict[str, Any] | None:
    """A JSON record; None when there is none or it can't be read."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


# -- the node's lock -----------------------------------------------------------------------------------------
@contextmanager
def node_lock(
    state: Path,
    purpose: str,
    announce: Callable[[str], None],
    *,
    owner: Owner | None = None,
    poll_s: float = 0.25,
) -> Iterator[None]:
    """Have the node to oneself for the time of the block: one measurement at a time, whoever schedules them.

    The lock goes with the process that holds it, so that nobody has to clean up after a crash. Between two
    measurements of a workflow its session stays up; with `owner`, another workflow's session is waited for as
    well, or two workflows would take turns and each cell would pay for a start of its engines.

    Args:
        purpose: what the node is wanted for, shown to those who wait ("cell pd-1+1core/long/c8/0-0").
        announce: told at once, and then every minute, for whom the caller waits.
        owner: the workflow that asks.
        poll_s: seconds between two tries.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(state / "node.lock", mode=0o600)
    note = state / "node.json"
    begun = time.monotonic()
    announced = -_ANNOUNCE_EVERY_S
    while True:
        try:
            lock.acquire(timeout=0)
            before_us = _session_of_another(state, owner)
            if before_us is None:
                break
            lock.release()
        except Timeout:
            before_us = lock_holder(state)
        waited = time.monotonic() - begun
        if waited - announced >= _ANNOUNCE_EVERY_S:
            announced = waited
            announce(f"waiting for {before_us}" + (f", {waited:.0f} s" if waited >= 1 else ""))
        time.sleep(poll_s)
    try:
        write_json(note, {"purpose": purpose, "process": str(ProcessId.current()), "since": time.time()})
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def _session_of_another(state: Path, owner: Owner | None) -> str | None:
    """The session of another workflow that is up now, for a person; None when there is none."""
    record = read_record(session_record(state))
    if owner is None or record is None or record["phase"] not in ("starting", "ready"):
        return None
    if record["owner"] in (None, str(owner)) or not ProcessId.parse(record["supervisor"]).alive():
        return None
    other = ProcessId.parse(record["owner"])
    return (
        f"the workflow of pid {other.pid}, whose session {record['label']} is up" if other.alive() else None
    )


def lock_holder(state: Path) -> str:
    """Who has the node, for a person."""
    record = read_record(state / "node.json")
    if record is None:
        return "another measurement on this machine"
    for_s = time.time() - float(record["since"])
    return f"{record['purpose']} (pid {record['process'].partition(':')[0]}, for {for_s:.0f} s)"


# -- plans that failed to start ------------------------------------------------------------------------------
def _poison_file(state: Path, owner: Owner | None, what: Any) -> Path:
    return state / "failed" / f"{owner or 'nobody'}".replace(":", "-") / f"{digest8(what)}.json"


def poison(state: Path, owner: Owner | None, what: Any, message: dict[str, Any]) -> None:
    """Remember for this owner that `what` failed to start; records of owners that are gone are dropped."""
    if owner is None:
        return
    failed = state / "failed"
    for folder in failed.iterdir() if failed.is_dir() else ():
        if not ProcessId.parse(folder.name.replace("-", ":")).alive():
            for file in folder.iterdir():
                file.unlink(missing_ok=True)
            folder.rmdir()
    write_json(_poison_file(state, owner, what), message)


def poisoned(state: Path, owner: Owner | None, what: Any) -> dict[str, Any] | None:
    """What `poison` recorded, if it did."""
    return None if owner is None else read_record(_poison_file(state, owner, what))
