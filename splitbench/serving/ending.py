# SPDX-License-Identifier: Apache-2.0
"""The end of a session from outside: told, forced, or cleaned up after; and what is up now.

The supervisor ends what it started. These functions are for the rest: to tell it to, to deal with one that is
stuck, and to end what one left behind that was itself killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from splitbench.errors import UserError
from splitbench.files import write_json
from splitbench.serving import gpu_memory, ports
from splitbench.serving.leftovers import mapped, remove_runtimes, remove_segments, segments
from splitbench.serving.link import Link
from splitbench.serving.processes import ProcessId, end_processes, marked, related
from splitbench.serving.session_processes import PORTS_FREE_LIMIT_S
from splitbench.serving.state import (
    Owner,
    lock_holder,
    progress_record,
    read_record,
    session_record,
    state_folder,
    supervisor_lock,
    supervisor_socket,
)
from splitbench.serving.supervisor import take_node

# A supervisor answers in milliseconds; this is for a machine that is brought to its knees by what it runs.
HELLO_LIMIT_S = 30.0
LEFTOVER_GRACE_S = 5.0


def supervisor_lives(state: Path) -> bool:
    """Whether a supervisor has this state folder."""
    handle = take_node(state)
    if handle is None:
        return True
    os.close(handle)
    return False


def wait_for_link(state: Path, progress: Callable[[str], None]) -> bool:
    """Nobody listens: wait until the supervisor does, or has gone.

    Returns:
        False when there is no supervisor; True when it is worth connecting again.
    """
    deadline = time.monotonic() + HELLO_LIMIT_S
    while supervisor_lives(state):
        if time.monotonic() > deadline:  # its socket was deleted, or it is stuck at its very start or end
            kill_supervisor(state, progress)
            return True
        time.sleep(0.02)
        if (link := Link.open(state)) is not None:
            link.close()
            return True
    return False


def greeted(link: Link, state: Path, progress: Callable[[str], None]) -> dict[str, Any] | None:
    """The record of the session that is up; None when its supervisor went away, or was stuck and killed."""
    deadline = time.monotonic() + HELLO_LIMIT_S
    while time.monotonic() < deadline:
        for message in link.messages(deadline - time.monotonic()):
            if message["event"] == "hello":
                return dict(message["record"])
        if link.closed:
            return None
    link.close()
    kill_supervisor(state, progress)
    return None


def kill_supervisor(state: Path, progress: Callable[[str], None]) -> None:
    """End a supervisor that does not answer (stopped, or worse), and what it leaves, as after a crash.

    Raises:
        UserError: it does not go.
    """
    try:
        process = ProcessId.parse(supervisor_lock(state).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return  # it has not come so far as to sign, or has gone
    progress(f"the supervisor (pid {process.pid}) does not answer: killing it")
    process.signal(signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while process.alive():
        if time.monotonic() > deadline:
            raise UserError(
                "the supervisor can't be killed",
                where=str(state),
                mend=f"look at pid {process.pid} with ps",
            )
        time.sleep(0.02)
    clean_leftovers(state, progress)


def stop(
    state: Path | None = None,
    *,
    owner: Owner | None = None,
    progress: Callable[[str], None] = lambda text: None,
    reason: str = "told to stop",
) -> bool:
    """End the session that is up, and wait until its processes are gone and its ports free.

    Cleans up as well after a supervisor that was itself killed.

    Args:
        owner: end only a session of this owner (what a workflow does at its end: somebody else's may be up);
            None: whosever it is.

    Returns:
        True when something was ended.

    Raises:
        UserError: something can't be ended.
    """
    state = state_folder() if state is None else state
    ended = False
    while True:
        link = Link.open(state)
        if link is None:
            if wait_for_link(state, progress):
                continue
            return clean_leftovers(state, progress) > 0 or ended
        record = greeted(link, state, progress)
        if record is None:
            ended = True
            continue
        if owner is not None and record["owner"] != str(owner):
            link.close()
            return ended
        ended = True
        link.send(op="stop", reason=reason)
        _await_end(link, state, record, progress)


def _await_end(link: Link, state: Path, record: dict[str, Any], progress: Callable[[str], None]) -> None:
    """Follow a session to its end; a supervisor that does not come to it is killed."""
    # Grace, the firm end, the ports, the memory: the sum of the supervisor's own limits.
    deadline = time.monotonic() + float(record["grace_s"]) + 150.0
    while not link.closed and time.monotonic() < deadline:
        for message in link.messages(deadline - time.monotonic()):
            if message["event"] == "progress":
                progress(message["text"])
            elif message["event"] == "ended":
                left = message["record"]["stop"].get("left")
                if left:
                    raise UserError(
                        f"processes can't be ended: {', '.join(left)}",
                        where=record["label"],
                        mend="look at them with ps; one in state D waits for a device",
                    )
    stuck = not link.closed
    link.close()
    if stuck:
        kill_supervisor(state, progress)


def clean_leftovers(state: Path, progress: Callable[[str], None]) -> int:
    """End what a killed supervisor left behind: found by recorded pids and start times, and by the mark.

    Returns:
        The number of processes that were found; 0 as well when a supervisor is alive, since then none is
        left over.

    Raises:
        UserError: some can't be ended.
    """
    handle = take_node(state, patience_s=1.0)
    if handle is None:
        return 0
    try:
        record = read_record(session_record(state)) or {}
        roots = [ProcessId.parse(each["process"]) for each in record.get("processes", [])]
        me = os.getpid()

        shared = {str(name): int(inode) for name, inode in record.get("shared_memory", {}).items()}

        def found() -> list[ProcessId]:
            both = {process.pid: process for process in (*marked(str(state)), *related(roots))}
            both.pop(me, None)
            return list(both.values())

        left = found()
        if left:
            progress(f"ending what a killed supervisor left behind ({len(left)} of its processes)")
            shared |= mapped((process.pid for process in left), segments())
            leaders = [process for process in roots if process in left]
            grace_s = min(LEFTOVER_GRACE_S, float(record.get("grace_s", LEFTOVER_GRACE_S)))
            ending = asyncio.run(end_processes(leaders, found, grace_s))
            if ending.left:
                raise UserError(
                    f"processes can't be ended: {', '.join(map(str, ending.left))}",
                    where=str(record.get("label", state)),
                    mend="look at them with ps; one in state D waits for a device",
                )
        if record and record.get("phase") != "ended":
            _wait_for_ports(record["ports"])
            _wait_for_memory(record, progress)
            record |= {"phase": "ended", "reason": record.get("reason") or "its supervisor was killed"}
            write_json(session_record(state), record)
            with suppress(OSError):
                write_json(Path(record["folder"]) / "session.json", record)
        for path in (*state.glob("client-*.sock"), supervisor_socket(state)):
            path.unlink(missing_ok=True)
        remove_runtimes(state)
        remove_segments(shared)
        return len(left)
    finally:
        os.close(handle)


def _wait_for_ports(held: list[int]) -> None:
    deadline = time.monotonic() + PORTS_FREE_LIMIT_S
    while ports.busy(held) and time.monotonic() < deadline:
        time.sleep(0.05)


def _wait_for_memory(record: dict[str, Any], progress: Callable[[str], None]) -> None:
    before = {int(index): int(mib) for index, mib in record["memory_before_mib"].items()}
    for index, mib in asyncio.run(gpu_memory.wait_until_back(before)).items():
        progress(f"GPU {index} still has {mib} MiB more in use than before the session")


def _held(state: Path) -> bool:
    """Whether the process that noted itself as measuring is still there; a killed one leaves its note behind."""
    note = read_record(state / "node.json")
    return note is not None and ProcessId.parse(note["process"]).alive()


def status(state: Path | None = None) -> dict[str, Any]:
    """What is up here: `supervisor` (alive or not), `session` (its record or None), `measuring` (who), `progress`.

    `progress` is how far the cell is that is being measured; None where there is none.
    """
    state = state_folder() if state is None else state
    record = read_record(session_record(state))
    alive = supervisor_lives(state)
    if record is not None:
        for each in record["processes"]:
            each["alive"] = ProcessId.parse(each["process"]).alive()
    held = _held(state)
    progress = read_record(progress_record(state)) if held else None
    if progress is not None and not ProcessId.parse(progress["process"]).alive():
        progress = None  # of a cell that was killed
    return {
        "state": str(state),
        "supervisor": alive,
        "session": record,
        "measuring": lock_holder(state) if held else None,
        "progress": progress,
    }
