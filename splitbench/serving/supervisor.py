# SPDX-License-Identifier: Apache-2.0
"""The process that has a session: it starts the engines of one plan, watches them, and ends every one of them.

One per node, in an OS session of its own, with no file of its caller open. It ends when it is told to, when
its owner has gone, when nobody has used the session for a while, or when a process of the session dies.
Whatever it started, and whatever that started, is its descendant for good (it is a subreaper), so it can end
all of them and nothing else.

It is run as `python -m splitbench.serving.supervisor REQUEST.json` by `splitbench.serving.session`, which
says what is in the request, and talks JSON lines over a Unix socket in the (private) state folder:

=====================
============================================================================================= to the
supervisor      `{"op": "attach"}` use the session until the connection closes; `{"op": "stop"}` end it from
the supervisor    `hello` the record at once; `progress` a line for people; then one of `ready` (the session),
                       `failed` (did not start, why), `lost` (was up and is no more, why); `ended` when all
                       is gone
=====================
=============================================================================================

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
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from splitbench.files import read_json, write_json, write_text
from splitbench.serving import gpu_memory, ports, readiness
from splitbench.serving.failures import SessionError, ended_how, mend_for, with_tail
from splitbench.serving.launch import Child, become_subreaper, child_environment, reap, spawn
from splitbench.serving.processes import (
    SESSION_VARIABLE,
    STATE_VARIABLE,
    Ending,
    ProcessId,
    all_processes,
    descendants,
    end_processes,
    marked,
)
from splitbench.serving.state import Owner, poison, session_record, supervisor_lock, supervisor_socket

EXIT_LOCKED = 3  # another supervisor has the node

LIVENESS_EVERY_S = 10.0
OWNER_EVERY_S = 1.0  # only where the kernel can't tell us by itself
PORTS_FREE_LIMIT_S = 15.0
LOG_LIMIT_BYTES = 2 * 2**30  # an engine that writes more is broken, and about to fill the disk


class Supervisor:
    """One session from start to end."""

    def __init__(self, request: dict[str, Any], listener: socket.socket) -> None:
        self.request = request
        self.plan: dict[str, Any] = request["plan"]
        self.state = Path(request["state"])
        self.folder = Path(request["folder"])
        self.owner = Owner(*map(int, request["owner"].split(":"))) if request["owner"] else None
        self.client_socket = Path(request["client"]["socket"]) if request["client"] else None
        self.listener = listener
        self.children: dict[int, Child] = {}
        self.subscribers: set[asyncio.StreamWriter] = set()
        self.phase = "starting"
        self.reason: str | None = None
        self.failure: SessionError | None = None
        self.times: dict[str, float] = {}
        self.begun = time.monotonic()
        self.begun_at = time.time()
        self.used_until = time.monotonic()
        self.memory_before: dict[int, int] = {}
        self.stop_facts: dict[str, Any] = {}
        self.ending = asyncio.Event()

    # -- the record ------------------------------------------------------------------------------------------
    def record(self) -> dict[str, Any]:
        """All that is known of the session, as plain data."""
        return {
            "id": self.request["id"],
            "identity": self.request["identity"],
            "label": self.request["label"],
            "layout": self.plan["layout"],
            "plan_digest": self.request["plan_digest"],
            "restart": self.request["restart"],
            "owner": self.request["owner"],
            "folder": str(self.folder),
            "phase": self.phase,
            "reason": self.reason,
            "supervisor": str(ProcessId.current()),
            "started_at": self.begun_at,
            "started_monotonic": self.begun,
            "front": [readiness.reachable(self.front["host"]), self.front["port"]],
            "ports": self.ports(),
            "client_socket": str(self.client_socket) if self.client_socket else None,
            "processes": [self._process_record(child) for child in self.children.values()],
            "memory_before_mib": self.memory_before,
            "times_s": self.times,
            "stop": self.stop_facts,
            "grace_s": self.plan["shutdown_grace_s"],
        }

    def _process_record(self, child: Child) -> dict[str, Any]:
        part = self.part(child)
        return {
            "name": child.name,
            "kind": child.kind,
            "role": part.get("role"),
            "host": readiness.reachable(part["host"]) if "host" in part else None,
            "port": part.get("port"),
            "process": str(child.process),
            "log": str(child.log),
            "ended": None if child.status is None else ended_how(child.status),
        }

    def part(self, child: Child) -> dict[str, Any]:
        """The part of the plan that a child was started from."""
        if child.kind == "engine":
            return next(dict(engine) for engine in self.plan["engines"] if engine["name"] == child.name)
        return dict(self.plan["proxy"]) if child.kind == "proxy" else {}

    @property
    def front(self) -> dict[str, Any]:
        """The part of the plan that clients talk to."""
        return dict(self.plan["proxy"] or self.plan["engines"][0])

    def ports(self) -> list[int]:
        """Every port that the session binds."""
        parts = [*self.plan["engines"], *([self.plan["proxy"]] if self.plan["proxy"] else [])]
        return [port for part in parts for port in (part["port"], *part["other_ports"])]

    def write_record(self) -> None:
        """Keep the record in the state folder (for the next start) and beside the logs (for the reader)."""
        content = self.record()
        with contextlib.suppress(
            OSError
        ):  # a full disk or a deleted folder must not keep us from ending engines
            write_json(session_record(self.state), content)
        with contextlib.suppress(OSError):
            write_json(self.folder / "session.json", content)

    def note(self, step: str) -> None:
        """Keep the time of a step, in seconds since the session began."""
        self.times[step] = round(time.monotonic() - self.begun, 3)

    # -- messages --------------------------------------------------------------------------------------------
    def tell(self, event: str, **content: Any) -> None:
        """Send an event to everybody who is attached."""
        line = json.dumps({"event": event, **content}).encode() + b"\n"
        for writer in list(self.subscribers):
            with contextlib.suppress(Exception):  # a reader that has gone is noticed by its own task
                writer.write(line)

    def progress(self, text: str) -> None:
        """A line for people: to those attached, and to the supervisor's own log."""
        sys.stderr.write(f"{time.monotonic() - self.begun:8.2f} s  {text}\n")
        sys.stderr.flush()
        self.tell("progress", text=text)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One caller: what it wants, and what it is told until it hangs up."""
        try:
            writer.write(json.dumps({"event": "hello", "record": self.record()}).encode() + b"\n")
            while line := await reader.readline():
                ask = json.loads(line)
                if ask["op"] == "stop":
                    self.subscribers.add(writer)
                    self.end(ask.get("reason", "told to stop"))
                elif ask["op"] == "attach":
                    self.subscribers.add(writer)
                    if self.phase == "ready":
                        sick = await self.sickness()
                        if sick is not None:
                            self.lose(sick)
                        else:
                            self.tell_ready(writer)
        except (OSError, ValueError, KeyError):
            pass
        finally:
            self.subscribers.discard(writer)
            self.used_until = time.monotonic()
            writer.close()

    def tell_ready(self, writer: asyncio.StreamWriter) -> None:
        """Say to one caller that the session is up."""
        writer.write(json.dumps({"event": "ready", "record": self.record()}).encode() + b"\n")

    # -- the end ---------------------------------------------------------------------------------------------
    def end(self, reason: str) -> None:
        """Begin to end the session; the first reason stays."""
        if not self.ending.is_set():
            self.reason = reason
            self.ending.set()

    def lose(self, reason: str) -> None:
        """The session is broken: those who measure must know at once, before anything is torn down."""
        if not self.ending.is_set():
            self.tell("lost", reason=reason)
            self.end(reason)

    def on_child(self) -> None:
        """SIGCHLD: collect, and see whether the session can go on."""
        for child in reap(self.children):
            if self.phase == "ready" and child.status is not None:
                self.lose(
                    f"{child.kind} {child.name} (pid {child.pid}) {ended_how(child.status)}, log: {child.log}"
                )

    # -- start -----------------------------------------------------------------------------------------------
    async def bring_up(self) -> None:
        """Everything from free ports to the first completion.

        Raises:
            SessionError: why it did not come up.
        """
        self.check_ports()
        if self.plan["budget"]["kind"] == "gpus":
            devices = sorted({device for engine in self.plan["engines"] for device in engine["devices"]})
            self.memory_before = gpu_memory.used_mib(devices)
        for name, text in self.plan["files"].items():
            write_text(self.folder / name, text)
        engines = [self.start(engine["name"], "engine", engine) for engine in self.plan["engines"]]
        client = self.start("client", "client", self.request["client"]) if self.request["client"] else None
        await self.all_of(
            [
                self.engine_ready(child, engine)
                for child, engine in zip(engines, self.plan["engines"], strict=True)
            ]
        )
        self.note("engines")
        if self.plan["proxy"]:
            await self.http_ready(self.start("proxy", "proxy", self.plan["proxy"]), self.plan["proxy"])
            self.note("proxy")
        if client is not None:
            await self.client_ready(client)
            self.note("client")
        await self.first_completions(engines)
        self.note("first_completion")

    async def all_of(self, waits: list[Coroutine[Any, Any, None]]) -> None:
        """Wait for all; the first failure ends the waiting for the others."""
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def check_ports(self) -> None:
        """Nobody else may hold a port of the plan, on any address."""
        for port in ports.busy(self.ports()):
            owner = next(
                (e["name"] for e in self.plan["engines"] if port in (e["port"], *e["other_ports"])),
                "the proxy",
            )
            raise SessionError(
                f"port {port} of {owner} is in use by {ports.holder(port)}",
                where=self.plan["layout"],
                mend="end that process, or choose another port for the layout",
            )

    def start(self, name: str, kind: str, part: dict[str, Any]) -> Child:
        """Start one process of the session."""
        marks = {SESSION_VARIABLE: self.request["id"], STATE_VARIABLE: str(self.state)}
        env = child_environment(os.environ, part["env"], part["argv"], marks)
        try:
            child = spawn(name, kind, part["argv"], env, self.folder, time.monotonic() - self.begun)
        except OSError as error:
            raise SessionError(
                f"{kind} {name} can't be started: {error.strerror}: {part['argv'][0]}",
                where=self.plan["layout"],
                mend="make the environment that its interpreter belongs to",
            ) from error
        self.children[child.pid] = child
        self.write_record()
        self.progress(f"{kind} {name}: started (pid {child.pid}, log {child.log})")
        return child

    def failed(self, child: Child, why: str) -> SessionError:
        """The error for a process that did not come up."""
        return with_tail(
            f"{child.kind} {child.name} {why}",
            where=self.plan["layout"],
            mend=mend_for(child.log, child.status),
            log=child.log,
        )

    def check_alive(self, child: Child) -> None:
        """Raise when the process, or any other of the session, has ended."""
        for each in [child, *self.children.values()]:
            if each.status is not None:
                took = time.monotonic() - self.begun - each.started_s
                raise self.failed(each, f"{ended_how(each.status)} {took:.1f} s after its start")

    async def http_ready(self, child: Child, part: dict[str, Any]) -> None:
        """Wait until a server of ours is healthy and serves the right model."""
        host, port, limit_s = part["host"], part["port"], float(part["startup_limit_s"])
        last = readiness.Answer(0, "not asked yet")

        async def healthy() -> bool | None:
            nonlocal last
            self.check_alive(child)
            last = await readiness.ask(host, port, "/health")
            self.check_alive(child)
            if last.status == 0:
                return None
            ours = ports.listened_by(port, self.family(child))
            if ours is False:
                raise self.failed(child, f"shares port {port} with another process: {ports.holder(port)}")
            return True if last.status == 200 else None

        def waiting(waited_s: float) -> None:
            self.progress(
                f"{child.kind} {child.name}: not ready after {waited_s:.0f} s of at most {limit_s:.0f} s"
            )

        try:
            await readiness.until(healthy, limit_s, waiting)
        except TimeoutError:
            seen = f"HTTP {last.status}" if last.status else last.text
            raise self.failed(child, f"was not healthy within {limit_s:g} s (last: {seen})") from None
        answer = await readiness.ask(host, port, "/v1/models", limit_s=30.0)
        self.check_alive(child)
        names = readiness.model_ids(answer)
        if self.plan["served_model"] not in names:
            said = ", ".join(names) if names else f"HTTP {answer.status} {answer.text[:200]}"
            raise self.failed(
                child, f"serves the wrong model: {self.plan['served_model']} wanted, {said} found"
            )

    async def engine_ready(self, child: Child, part: dict[str, Any]) -> None:
        """Wait for one engine and keep its time."""
        await self.http_ready(child, part)
        self.note(f"engine {child.name}")
        self.progress(
            f"engine {child.name}: healthy after {self.times[f'engine {child.name}'] - child.started_s:.1f} s"
        )

    async def client_ready(self, child: Child) -> None:
        """Wait until the warm benchmark client answers on its socket."""
        assert self.client_socket is not None
        path, limit_s = self.client_socket, float(self.request["client"]["startup_limit_s"])

        async def listens() -> bool | None:
            self.check_alive(child)
            return True if await readiness.accepts(path) else None

        def waiting(waited_s: float) -> None:
            self.progress(f"benchmark client: not ready after {waited_s:.0f} s of at most {limit_s:.0f} s")

        try:
            await readiness.until(listens, limit_s, waiting)
        except TimeoutError:
            raise self.failed(child, f"was not ready within {limit_s:g} s") from None

    async def first_completions(self, engines: list[Child]) -> None:
        """Real completions through the front door, until every engine has had its part; in PD, KV must move."""
        host, port = self.front["host"], self.front["port"]
        decoders = [child for child in engines if self.part(child)["role"] == "decode"]
        before = [await self.transferred(child) for child in decoders]
        roles = [engine["role"] for engine in self.plan["engines"]]
        for number in range(readiness.pairs_to_probe(self.plan["kind"], roles)):
            wrong = await readiness.complete(host, port, self.plan["served_model"], number)
            self.check_alive(engines[0])
            if wrong is not None:
                child = next(reversed([c for c in self.children.values() if c.kind != "client"]))
                raise self.failed(child, f"answers /health but not the first completion: {wrong}")
        for child, had in zip(decoders, before, strict=True):
            if had is not None and not await self.moved(child, had):
                raise self.failed(
                    child,
                    f"computed the first prompt ({readiness.PROBE_TOKENS} tokens) itself: no KV came from a prefill "
                    "engine, by its own metrics",
                )

    async def transferred(self, child: Child) -> float | None:
        """Tokens that a decoder has got from elsewhere so far."""
        part = self.part(child)
        answer = await readiness.ask(part["host"], part["port"], "/metrics", limit_s=30.0)
        return readiness.transferred_tokens(answer.text) if answer.status == 200 else None

    async def moved(self, child: Child, before: float) -> bool:
        """Whether the decoder's count of transferred tokens has risen; metrics may lag an answer a little."""
        for _ in range(12):
            now = await self.transferred(child)
            if now is not None and now > before:
                return True
            await asyncio.sleep(0.25)
        return False

    def family(self, child: Child) -> list[int]:
        """A child's pid and those of its descendants."""
        return [child.pid, *(stat.pid for stat in descendants(child.pid, all_processes()))]

    # -- life ------------------------------------------------------------------------------------------------
    async def sickness(self) -> str | None:
        """Ask every server whether it is well; None when all are, or are only slow."""
        for child in list(self.children.values()):
            part = self.part(child)
            if "port" not in part:
                continue
            answer = await readiness.ask(part["host"], part["port"], "/health", limit_s=10.0)
            # No answer in time is a busy engine; a refusal to connect is the end of its server.
            if answer.status >= 500 or (answer.status == 0 and "refused" in answer.text):
                said = f"HTTP {answer.status}" if answer.status else answer.text
                return f"{child.kind} {child.name} is not healthy any more ({said}), log: {child.log}"
        return None

    async def watch(self) -> None:
        """What no signal tells: idleness, sickness, logs without end. A few system calls every ten seconds."""
        idle_s = self.request["idle_s"]
        while True:
            await asyncio.sleep(
                LIVENESS_EVERY_S if idle_s is None else min(LIVENESS_EVERY_S, max(0.1, idle_s / 4))
            )
            for child in self.children.values():
                with contextlib.suppress(OSError):
                    if child.log.stat().st_size > LOG_LIMIT_BYTES:
                        self.lose(f"{child.kind} {child.name} wrote more than 2 GiB of log: {child.log}")
            if self.phase != "ready":
                continue
            sick = await self.sickness()
            if sick is not None:
                self.lose(sick)
            if idle_s is not None and not self.subscribers and time.monotonic() - self.used_until > idle_s:
                self.end(f"not used for {idle_s:g} s")

    async def watch_owner(self) -> None:
        """End when the owner has gone: told by the kernel where it can, else by looking every second."""
        owner = self.owner
        if owner is None:
            return
        gone = asyncio.Event()
        handle: int | None = None
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(owner.pid)
            asyncio.get_running_loop().add_reader(handle, gone.set)
        try:
            while owner.alive():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(gone.wait(), OWNER_EVERY_S if handle is None else None)
                if gone.is_set() and owner.alive():  # still there for a moment, on its way out
                    await asyncio.sleep(0.01)
        finally:
            if handle is not None:
                asyncio.get_running_loop().remove_reader(handle)
                os.close(handle)
        self.lose(f"its owner (pid {owner.pid}) has gone")

    # -- teardown --------------------------------------------------------------------------------------------
    def everything(self) -> list[ProcessId]:
        """Every living process that came of this session."""
        below = descendants(os.getpid(), all_processes())
        return [ProcessId(stat.pid, stat.started) for stat in below if not stat.dead]

    async def tear_down(self) -> None:
        """End all processes, and wait until ports and accelerator memory are free again."""
        begun = time.monotonic()
        leaders = [child.process for child in self.children.values() if child.status is None]

        def collect() -> None:
            reap(self.children)

        ending = await end_processes(leaders, self.everything, self.plan["shutdown_grace_s"], reap=collect)
        strays = marked(str(self.state), self.request["id"])
        if strays:
            again = await end_processes(
                [], lambda: marked(str(self.state), self.request["id"]), 0.0, reap=collect
            )
            ending = Ending(
                ending.took_s + again.took_s, ending.killed + again.killed, (*ending.left, *again.left)
            )
        if ending.left:
            self.progress("can't be ended: " + ", ".join(f"pid {process.pid}" for process in ending.left))
        processes_s = time.monotonic() - begun
        while (
            held := ports.busy(self.ports())
        ) and time.monotonic() - begun < processes_s + PORTS_FREE_LIMIT_S:
            await asyncio.sleep(0.05)
        ports_s = time.monotonic() - begun
        memory = await gpu_memory.wait_until_back(self.memory_before)
        self.stop_facts = {
            "processes_gone_s": round(processes_s, 3),
            "ports_free_s": round(ports_s, 3),
            "memory_back_s": round(time.monotonic() - begun, 3),
            "killed": ending.killed,
            "left": [str(process) for process in ending.left],
            "ports_held": held,
            "memory_held_mib": memory,
        }
        for index, mib in memory.items():
            self.progress(f"GPU {index} still has {mib} MiB more in use than before this session")

    # -- the whole life --------------------------------------------------------------------------------------
    async def run(self) -> None:
        """From the first process to the last."""
        loop = asyncio.get_running_loop()
        become_subreaper()
        loop.add_signal_handler(signal.SIGCHLD, self.on_child)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.lose, f"the supervisor was sent {number.name}")
        self.write_record()
        server = await asyncio.start_unix_server(self.connection, sock=self.listener)
        tasks = [asyncio.ensure_future(self.watch_owner()), asyncio.ensure_future(self.watch())]
        try:
            await self.live()
        except Exception as error:
            self.lose(f"the supervisor failed: {type(error).__name__}: {error}")
            raise
        finally:
            # Whatever happened: nothing that was started is left behind.
            self.phase = "stopping"
            self.write_record()
            self.progress(f"stopping: {self.reason}")
            for task in tasks:
                task.cancel()
            await self.tear_down()
            self.phase = "ended"
            self.note("ended")
            self.write_record()
            if self.client_socket is not None:
                self.client_socket.unlink(missing_ok=True)
            supervisor_socket(self.state).unlink(missing_ok=True)
            self.progress(f"ended: {self.reason}")
            if self.failure is not None:
                self.tell("failed", failure=self.failure.record())
            self.tell("ended", reason=self.reason, record=self.record())
            server.close()
            for writer in list(self.subscribers):
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(writer.drain(), 1.0)
                    writer.close()

    async def live(self) -> None:
        """Bring the session up, and return when it is to end."""
        starting = asyncio.ensure_future(self.bring_up())
        ending = asyncio.ensure_future(self.ending.wait())
        await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not self.ending.is_set():
            self.settle(starting)
        await ending
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)

    def settle(self, starting: asyncio.Future[None]) -> None:
        """The bring-up has come to its end: ready, or failed."""
        error = starting.exception()
        if error is None:
            self.phase = "ready"
            self.used_until = time.monotonic()
            self.note("ready")
            self.write_record()
            # From here on everything of ours may wait: the engines and the client come first. Not before,
            # since children inherit it.
            with contextlib.suppress(OSError):
                os.nice(5)
            self.progress(f"ready after {self.times['ready']:.1f} s")
            for writer in list(self.subscribers):
                self.tell_ready(writer)
            # A process may have ended between its last check and now.
            for child in self.children.values():
                if child.status is not None:
                    self.lose(f"{child.kind} {child.name} (pid {child.pid}) {ended_how(child.status)}")
            return
        if not isinstance(error, SessionError):
            error = SessionError(
                f"the supervisor failed: {type(error).__name__}: {error}", where=self.plan["layout"]
            )
        self.failure = error
        if self.children:  # a port that somebody holds costs nothing to look at again; a start does
            poison(self.state, self.owner, self.request["poison_key"], error.record())
        self.end(f"failed to start: {error.message}")


def take_node(state: Path, patience_s: float = 0.0) -> int | None:
    """Lock the state folder for this process and those forked from it; None when another supervisor has it.

    Args:
        patience_s: how long to try; those who only look whether a supervisor lives hold the lock for a moment.
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


def listen(state: Path) -> socket.socket:
    """Bind the supervisor's socket; the lock is held, so that a socket that is there is of a dead supervisor."""
    path = supervisor_socket(state)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(16)
    return listener


def main(arguments: list[str]) -> int:
    """Become the supervisor of a session: returns in the caller's child, lives on in the background."""
    request = read_json(Path(arguments[0]))
    state = Path(request["state"])
    if take_node(state, patience_s=1.0) is None:
        return EXIT_LOCKED
    listener = listen(state)
    if os.fork() > 0:
        return 0
    os.setsid()
    os.chdir("/")
    asyncio.run(Supervisor(request, listener).run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
