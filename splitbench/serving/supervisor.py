# SPDX-License-Identifier: Apache-2.0
"""The process that has a session: it starts the engines of one plan, watches them, and ends every one.

One per node, in an OS session of its own, with no file of its caller open. It ends when it is told to, when
its owner has gone, when nobody has used the session for a while, or when a process of the session dies.
Whatever it started, and whatever that started, is its descendant for good (it is a subreaper), so it can end
all of them and nothing else.

It is run as `python -m splitbench.serving.supervisor REQUEST.json` by `splitbench.serving.session`, which
writes the request, and talks JSON lines over a Unix socket in the (private) state folder:

=====================  ==================================================================================
to the supervisor      `{"op": "attach"}` use the session until the connection closes; `{"op": "check"}`
                       say `well` if all servers answer; `{"op": "stop", "reason": ...}` end it
from the supervisor    `hello` with the record at once; `progress` a line for people; `ready` with the
                       record; `lost` when the session can't be used (any more), with the reason;
                       `ended` when everything is gone, with the record (a failed start is in it)
=====================  ==================================================================================

It imports nothing heavy: it must start in a moment and cost nothing beside a measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from splitbench.files import read_json, write_json
from splitbench.serving.failures import SessionError
from splitbench.serving.launch import become_subreaper, reap
from splitbench.serving.leftovers import make_runtime
from splitbench.serving.processes import ProcessId
from splitbench.serving.session_processes import SessionProcesses
from splitbench.serving.state import Owner, poison, session_record, supervisor_lock, supervisor_socket

EXIT_LOCKED = 3  # another supervisor has the node

LIVENESS_EVERY_S = 10.0
OWNER_EVERY_S = 1.0  # only where the kernel can't tell us by itself
LOG_LIMIT_BYTES = 2 * 2**30  # an engine that writes more is broken, and about to fill the disk
_NICE = 5


class Supervisor:
    """One session from start to end, and those who are told of it."""

    def __init__(self, request: dict[str, Any], listener: socket.socket, node: int) -> None:
        self.request = request
        self.node = node
        self.state = Path(request["state"])
        self.folder = Path(request["folder"])
        self.idle_s: float | None = request["idle_s"]
        self.owner: Owner | None = None
        if request["owner"]:
            owner = ProcessId.parse(request["owner"])
            self.owner = Owner(owner.pid, owner.started)
        self.listener = listener
        self.processes = SessionProcesses(request, self.progress, self.write_record)
        self.started_at = time.time()
        self.phase = "starting"
        self.reason: str | None = None
        self.failure: SessionError | None = None
        self.stop_facts: dict[str, Any] = {}
        self.history: list[str] = []
        self.attached: set[asyncio.StreamWriter] = set()
        self.callers: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self.unused_since = time.monotonic()
        self.ending = asyncio.Event()

    # -- the record -------------------------------------------------------------------------------------
    def record(self) -> dict[str, Any]:
        """All that is known of the session, as plain data."""
        client = self.request["client"]
        return {
            "id": self.request["id"],
            "identity": self.request["identity"],
            "label": self.request["label"],
            "layout": self.processes.plan["layout"],
            "plan_digest": self.request["plan_digest"],
            "restart": self.request["restart"],
            "owner": self.request["owner"],
            "folder": str(self.folder),
            "phase": self.phase,
            "reason": self.reason,
            "failure": self.failure.record() if self.failure else None,
            "supervisor": str(ProcessId.current()),
            "started_at": self.started_at,
            "started_monotonic": self.processes.begun,
            "front": list(self.processes.front),
            "ports": self.processes.ports(),
            "client_socket": client["socket"] if client else None,
            "processes": self.processes.records(),
            "memory_before_mib": self.processes.memory_before_mib,
            "shared_memory": self.processes.shared,
            "times_s": self.processes.times_s,
            "stop": self.stop_facts,
            "grace_s": self.processes.plan["shutdown_grace_s"],
        }

    def has_node(self) -> bool:
        """Whether the lock that it holds is still the one that others look at.

        It is not when somebody deleted the state folder: then nobody finds this session any more, another one may
        start beside it, and what is in a new state folder is that one's.
        """
        try:
            here = supervisor_lock(self.state).stat()
        except OSError:
            return False
        mine = os.fstat(self.node)
        return (here.st_dev, here.st_ino) == (mine.st_dev, mine.st_ino)

    def write_record(self) -> None:
        """Keep the record in the state folder (for the next start) and beside the logs (for the reader)."""
        content = self.record()
        of_node = [session_record(self.state)] if self.has_node() else []
        for path in (*of_node, self.folder / "session.json"):
            # A full disk or a deleted folder must not keep us from ending engines, and a folder that somebody
            # deleted is not made again: the state's must be private, and the log's would be empty but for this.
            if path.parent.is_dir():
                with contextlib.suppress(OSError):
                    write_json(path, content)

    # -- messages ---------------------------------------------------------------------------------------
    def send(self, writer: asyncio.StreamWriter, event: str, **content: Any) -> None:
        """Send an event to one caller; one that has hung up is noticed by its own task."""
        with contextlib.suppress(Exception):
            writer.write(json.dumps({"event": event, **content}).encode() + b"\n")

    def tell(self, event: str, **content: Any) -> None:
        """Send an event to everybody who is attached."""
        for writer in list(self.attached):
            self.send(writer, event, **content)

    def progress(self, text: str) -> None:
        """A line for people: to those attached now or later, and to the supervisor's own log."""
        sys.stderr.write(f"{time.monotonic() - self.processes.begun:8.2f} s  {text}\n")
        sys.stderr.flush()
        self.history.append(text)
        self.tell("progress", text=text)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One caller: what it wants, and what it is told until it hangs up."""
        self.callers[writer] = asyncio.current_task()
        self.send(writer, "hello", record=self.record())
        try:
            while line := await reader.readline():
                ask = json.loads(line)
                if ask["op"] == "stop":
                    self.attached.add(writer)
                    self.end(ask["reason"])
                elif ask["op"] == "attach":
                    await self.attach(writer)
                elif ask["op"] == "check":
                    await self.check(writer)
        except (OSError, ValueError, KeyError):
            pass
        finally:
            self.attached.discard(writer)
            self.callers.pop(writer, None)
            self.unused_since = time.monotonic()
            writer.close()

    async def attach(self, writer: asyncio.StreamWriter) -> None:
        """Somebody wants to use the session: it must be well."""
        if self.phase == "starting":
            for text in self.history:
                self.send(writer, "progress", text=text)
        self.attached.add(writer)
        if self.phase == "ready":
            sick = await self.processes.sickness()
            if sick is None:
                self.send(writer, "ready", record=self.record())
            else:
                self.end(sick)

    async def check(self, writer: asyncio.StreamWriter) -> None:
        """Somebody has used the session and wants to know whether it was well to the end."""
        self.on_child()
        self.look_for_node()
        if self.phase == "ready" and not self.ending.is_set():
            sick = await self.processes.sickness()
            self.on_child()
            if sick is None and not self.ending.is_set():
                self.send(writer, "well")
            elif sick is not None:
                self.end(sick)

    # -- reasons to end ---------------------------------------------------------------------------------
    def end(self, reason: str) -> None:
        """Begin to end the session; the first reason stays. Who measures is told before the teardown."""
        if not self.ending.is_set():
            self.reason = reason
            self.tell("lost", reason=reason)
            self.ending.set()

    def look_for_node(self) -> None:
        """End when the state folder has gone: nothing keeps others from measuring at the same time."""
        if not self.has_node():
            self.end(f"its state folder was deleted while it was up: {self.state}")

    def on_child(self) -> None:
        """SIGCHLD: collect, and see whether the session can go on."""
        if reap(self.processes.children) and self.phase == "ready" and (why := self.processes.ended()):
            self.end(why)

    async def watch(self) -> None:
        """What no signal tells: idleness, sickness, logs without end. A few system calls per ten seconds."""
        every_s = (
            LIVENESS_EVERY_S if self.idle_s is None else min(LIVENESS_EVERY_S, max(0.1, self.idle_s / 4))
        )
        looked = time.monotonic()
        while True:
            await asyncio.sleep(every_s)
            now = time.monotonic()
            idle_s = now - self.unused_since
            if (
                self.phase == "ready"
                and not self.attached
                and self.idle_s is not None
                and idle_s > self.idle_s
            ):
                self.end(f"not used for {self.idle_s:g} s")
            if now - looked < LIVENESS_EVERY_S:
                continue
            looked = now
            self.look_for_node()
            for child in self.processes.children.values():
                with contextlib.suppress(OSError):
                    if child.log.stat().st_size > LOG_LIMIT_BYTES:
                        limit = f"{LOG_LIMIT_BYTES / 2**30:g} GiB"
                        self.end(f"{child.title} wrote more than {limit} of log: {child.log}")
            if self.phase == "ready" and (sick := await self.processes.sickness(measuring=True)):
                self.end(sick)

    async def watch_owner(self) -> None:
        """End when the owner has gone: told by the kernel where it can, else by looking every second."""
        if self.owner is None:
            return
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        handle: int | None = None
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(self.owner.pid)
            loop.add_reader(handle, gone.set)
        try:
            while self.owner.alive():
                if gone.is_set():  # the kernel says so, /proc not yet
                    await asyncio.sleep(0.01)
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(gone.wait(), OWNER_EVERY_S if handle is None else None)
        finally:
            if handle is not None:
                loop.remove_reader(handle)
                os.close(handle)
        self.end(f"its owner (pid {self.owner.pid}) has gone")

    # -- the whole life ---------------------------------------------------------------------------------
    async def run(self) -> None:
        """From the first process to the last: whatever happens, nothing that was started is left behind."""
        loop = asyncio.get_running_loop()
        become_subreaper()
        loop.add_signal_handler(signal.SIGCHLD, self.on_child)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.end, f"its supervisor was sent {number.name}")
        self.write_record()
        server = await asyncio.start_unix_server(self.connection, sock=self.listener)
        watchers = [asyncio.ensure_future(self.watch_owner()), asyncio.ensure_future(self.watch())]
        try:
            await self.live()
        except Exception as error:
            self.end(f"its supervisor failed: {type(error).__name__}: {error}")
            raise
        finally:
            self.phase = "stopping"
            self.write_record()
            self.progress(f"ending: {self.reason}")
            for watcher in watchers:
                watcher.cancel()
            self.stop_facts = await self.processes.tear_down()
            self.phase = "ended"
            self.processes.note("ended")
            self.write_record()
            if self.has_node():
                supervisor_socket(self.state).unlink(missing_ok=True)
            self.tell("ended", reason=self.reason, record=self.record())
            server.close()
            await self.hang_up()

    async def hang_up(self) -> None:
        """Close all connections once what was said has been read, or is not going to be."""
        for writer in list(self.callers):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(writer.drain(), 1.0)
            writer.close()
        tasks = [task for task in self.callers.values() if task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    async def live(self) -> None:
        """Bring the session up, and return when it is to end."""
        starting = asyncio.ensure_future(self.processes.bring_up())
        ending = asyncio.ensure_future(self.ending.wait())
        await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not self.ending.is_set():
            error = starting.exception()
            if error is None:
                self.ready()
            else:
                self.failed(error)
        await ending
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)

    def ready(self) -> None:
        """The session is up."""
        self.phase = "ready"
        self.unused_since = time.monotonic()
        self.processes.note("ready")
        self.write_record()
        # From here on everything of ours may wait: the engines and the client come first. Not before, since
        # children inherit it.
        with contextlib.suppress(OSError):
            os.nice(_NICE)
        self.progress(f"ready after {self.processes.times_s['ready']:.1f} s")
        self.tell("ready", record=self.record())
        if why := self.processes.ended():  # between its last check and now
            self.end(why)

    def failed(self, error: BaseException) -> None:
        """The session did not come up."""
        if not isinstance(error, SessionError):
            error = SessionError(
                f"the supervisor failed: {type(error).__name__}: {error}",
                where=self.processes.plan["layout"],
                mend=f"read {self.folder / 'supervisor.log'}",
            )
        self.failure = error
        # A port that somebody holds costs nothing to look at again; a start of engines does.
        if self.processes.children:
            poison(self.state, self.owner, self.request["poison_key"], error.record())
        self.reason = f"failed to start: {error.message}"
        self.ending.set()


def take_node(state: Path, patience_s: float = 0.0) -> int | None:
    """Lock the state folder for this process and those forked from it; None when another supervisor has it.

    Args:
        patience_s: how long to try; who only looks whether a supervisor lives holds the lock for a moment.
    """
    handle = os.open(supervisor_lock(state), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            if time.monotonic() >= deadline:
                os.close(handle)
                return None
        time.sleep(0.01)


def sign(node: int) -> None:
    """Write into the locked file who holds the lock, for those who have to deal with a stuck holder."""
    os.ftruncate(node, 0)
    os.pwrite(node, str(ProcessId.current()).encode(), 0)


def listen(state: Path) -> socket.socket:
    """Bind the supervisor's socket; the lock is held, so a socket that is there is a dead supervisor's."""
    path = supervisor_socket(state)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(16)
    return listener


def main(arguments: list[str]) -> int:
    """Become the supervisor of a session: returns in the caller's child, lives on in the background."""
    try:
        request = read_json(Path(arguments[0]))
        state = Path(request["state"])
        node = take_node(state, patience_s=1.0)
        if node is None:
            return EXIT_LOCKED
        listener = listen(state)
        sign(node)
        make_runtime(state, request["id"], Path(request["runtime"]))
    except OSError as error:
        sys.stderr.write(f"{error.filename or 'the state folder'}: {error.strerror}\n")
        return 1
    if os.fork() > 0:
        # The socket listens already, so that our caller can connect as soon as we return.
        return 0
    os.setsid()
    sign(node)
    os.chdir("/")
    asyncio.run(Supervisor(request, listener, node).run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
