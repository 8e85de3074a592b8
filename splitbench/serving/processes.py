# SPDX-License-Identifier: Apache-2.0
"""Processes named so that a reused pid is never mistaken for them, and their orderly end.

A pid alone is no identity: it is given again as soon as its process has gone. Here a process is its pid
*and* the time it was started (field 22 of /proc/PID/stat, in clock ticks since boot), and a signal goes
through a pidfd that was checked against that time, so that it reaches this very process or none.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# What an engine and all that comes of it carry in their environment: the session's id, and the state folder
# that the session is recorded in (so that two workflows of one user on different state folders leave each
# other alone).
SESSION_VARIABLE = "SPLITBENCH_SESSION"
STATE_VARIABLE = "SPLITBENCH_SESSION_STATE"

# Once the processes that were started by name have gone, what they forked gets this long to follow by itself.
FOLLOWING_S = 3.0


@dataclass(frozen=True)
class Stat:
    """What /proc/PID/stat says; `started` in clock ticks since boot."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    started: int

    @property
    def dead(self) -> bool:
        """A zombie runs nothing, holds no port and no memory; it waits for its parent to look."""
        return self.state in "ZXx"


def read_stat(pid: int) -> Stat | None:
    """The state of a process; None when it has gone (or /proc hides it)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name is in parentheses and may hold anything, parentheses included.
    fields = text.rpartition(")")[2].split()
    return Stat(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def all_processes() -> dict[int, Stat]:
    """Every process that /proc shows, by pid."""
    found = (read_stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {stat.pid: stat for stat in found if stat is not None}


def descendants(root: int, table: dict[int, Stat]) -> list[Stat]:
    """All processes below `root` in the table, parents before their children; zombies included."""
    children: dict[int, list[Stat]] = {}
    for stat in table.values():
        children.setdefault(stat.parent, []).append(stat)
    found: list[Stat] = []
    ahead = [root]
    while ahead:
        below = children.get(ahead.pop(), [])
        found.extend(below)
        ahead.extend(stat.pid for stat in below)
    return found


def environment(pid: int) -> dict[str, str] | None:
    """The environment a process began with; None when it may not be read, empty when it was overwritten."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (part.partition(b"=") for part in raw.split(b"\0") if b"=" in part)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def command_line(pid: int, width: int = 120) -> str:
    """What a process runs, shortened to `width` characters; empty when that can't be read."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    text = " ".join(os.fsdecode(part) for part in raw.split(b"\0") if part)
    return text if len(text) <= width else text[: width - 3] + "..."


@dataclass(frozen=True)
class ProcessId:
    """One process for all time: its pid and its start in clock ticks since boot."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The identity of a process that runs now."""
        stat = read_stat(pid)
        return None if stat is None or stat.dead else cls(pid, stat.started)

    @classmethod
    def current(cls) -> ProcessId:
        """The calling process."""
        found = cls.of(os.getpid())
        if found is None:
            raise RuntimeError(
                "/proc does not show this process: the workflow needs Linux with /proc mounted"
            )
        return found

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        """Read "pid:started".

        Raises:
            ValueError: the text has another form.
        """
        pid, _, started = text.partition(":")
        return cls(int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"

    def alive(self) -> bool:
        """This very process runs; a zombie does not."""
        stat = read_stat(self.pid)
        return stat is not None and stat.started == self.started and not stat.dead

    def signal(self, number: int) -> bool:
        """Send a signal to this process and no other; False when it has gone or is not ours to signal."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except (
            OSError
        ):  # a kernel or a sandbox without pidfd: check and signal, with a window of microseconds
            if not self.alive():
                return False
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)
                return True
            return False
        try:
            # If the pid is still ours now, it was when the handle was opened, so the handle is ours.
            if not self.alive():
                return False
            signal.pidfd_send_signal(handle, number)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(handle)
        return True


def marked(state: str, session: str | None = None) -> list[ProcessId]:
    """Processes of this user that carry the mark of a session of this state folder.

    Args:
        state: the state folder, as it was given to the engines.
        session: only this session's; None for all.
    """
    found: list[ProcessId] = []
    for pid, stat in all_processes().items():
        if stat.dead or not _own(pid):
            continue
        variables = environment(pid)
        if (
            variables
            and variables.get(STATE_VARIABLE) == state
            and (variables.get(SESSION_VARIABLE) == session if session else SESSION_VARIABLE in variables)
        ):
            found.append(ProcessId(pid, stat.started))
    return found


def _own(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.getuid()
    except OSError:
        return False


def related(roots: Iterable[ProcessId]) -> list[ProcessId]:
    """What is left of recorded processes: themselves, their descendants, and the rest of their OS sessions.

    Every root was started as the leader of an OS session. A member of that session whose environment can be
    read and lacks the mark was not started by us (the number was given again); one that has overwritten its
    environment, as programs do that set their title, is taken by its session alone.
    """
    table = all_processes()
    found: dict[int, ProcessId] = {}
    for root in roots:
        leader = table.get(root.pid)
        if leader is not None and leader.started != root.started:
            continue
        members = [
            stat
            for stat in table.values()
            if stat.session == root.pid and stat.started >= root.started and _own(stat.pid)
        ]
        for stat in members:
            variables = environment(stat.pid)
            if stat.pid != root.pid and variables and SESSION_VARIABLE not in variables:
                continue
            for each in [stat, *descendants(stat.pid, table)]:
                if not each.dead:
                    found[each.pid] = ProcessId(each.pid, each.started)
    return list(found.values())


@dataclass(frozen=True)
class Ending:
    """How processes ended: seconds it took, how many had to be killed, and who is still there after all."""

    took_s: float
    killed: int
    left: tuple[ProcessId, ...]


async def end_processes(
    leaders: Iterable[ProcessId],
    everything: Callable[[], list[ProcessId]],
    grace_s: float,
    *,
    reap: Callable[[], None] = lambda: None,
    firm_s: float = 30.0,
) -> Ending:
    """Ask process groups to end, then kill whatever is left, then wait until all have gone.

    Args:
        leaders: leaders of the process groups to be asked (SIGTERM to the whole group).
        everything: finds every process that must be gone; called again and again.
        grace_s: time from the request until the kill.
        reap: collects children that have ended; needed where the caller is their parent.
        firm_s: time after the kill until giving up (a process in an uninterruptible wait can't be killed).
    """
    leaders = list(leaders)
    begun = time.monotonic()
    for leader in leaders:
        _signal_group(leader, signal.SIGTERM)
    leaders_gone: float | None = None
    while True:
        reap()
        remaining = everything()
        now = time.monotonic()
        if not remaining:
            return Ending(now - begun, 0, ())
        if leaders_gone is None and not any(leader.alive() for leader in leaders):
            leaders_gone = now
            for process in remaining:  # those that had left their group and so were not asked yet
                process.signal(signal.SIGTERM)
        if now - begun >= grace_s or (leaders_gone is not None and now - leaders_gone >= FOLLOWING_S):
            break
        await asyncio.sleep(0.02 if now - begun < 2.0 else 0.1)
    killed: set[ProcessId] = set()
    firm = time.monotonic()
    while True:
        for process in remaining:
            # Killed again in every round: a process may fork while it is being looked for.
            if process.signal(signal.SIGKILL):
                killed.add(process)
        await asyncio.sleep(0.02)
        reap()
        remaining = everything()
        now = time.monotonic()
        if not remaining or now - firm > firm_s:
            return Ending(now - begun, len(killed), tuple(remaining))


def _signal_group(leader: ProcessId, number: int) -> None:
    """Signal a process group whose leader is alive: while it is, the number can't belong to another group."""
    if not leader.alive():
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, number)
