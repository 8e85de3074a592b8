# SPDX-License-Identifier: Apache-2.0
"""The processes of one session: brought up until the layout answers, asked whether they are well, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitbench.files import write_text
from splitbench.serving import gpu_memory, ports, proof, readiness
from splitbench.serving.failures import SessionError, ended_how, mend_for, with_tail
from splitbench.serving.launch import Child, child_environment, reap, spawn
from splitbench.serving.leftovers import (
    mapped,
    private_places,
    remove_runtimes,
    remove_segments,
    segments,
)
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
from splitbench.serving.waves import waves

# Processes that have gone hold no port: one that is still in use is a stranger's, who may keep it for ever.
PORTS_FREE_LIMIT_S = 3.0

# While a session starts; later none is made, and nothing may be looked at beside a measurement.
SHARED_EVERY_S = 1.0


def _places(engine: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [(engine.get("node", 0), device) for device in engine["devices"]]


class SessionProcesses:
    """What runs for a session, as children of the calling process, which must be a subreaper.

    Args:
        request: what `splitbench.serving.session` wrote: filled plan, client, the session's id and folders.
        progress: gets a line for people per step.
        started: called whenever there is more to be recorded at once: a process, or shared memory of one.
    """

    def __init__(
        self, request: dict[str, Any], progress: Callable[[str], None], started: Callable[[], None]
    ) -> None:
        self.id = str(request["id"])
        self.state = str(request["state"])
        self.folder = Path(request["folder"])
        self.runtime = Path(request["runtime"])
        self.plan: dict[str, Any] = request["plan"]
        self.client: dict[str, Any] | None = request["client"]
        self.progress = progress
        self.started = started
        self.children: dict[int, Child] = {}
        self.times_s: dict[str, float] = {}
        self.begun = time.monotonic()
        self.memory_before_mib: dict[int, int] = {}
        self.shared: dict[str, int] = {}  # names and inodes of shared memory that a process of ours maps
        self._not_ours = segments()
        self._looked_at: tuple[dict[str, int], float] = ({}, 0.0)

    # -- facts ------------------------------------------------------------------------------------------
    def part(self, child: Child) -> dict[str, Any]:
        """The part of the plan that a child was started from; nothing for the benchmark client."""
        if child.kind in ("engine", "service"):
            parts = self.plan[f"{child.kind}s"]
            return next(dict(part) for part in parts if part["name"] == child.name)
        return dict(self.plan["proxy"]) if child.kind == "proxy" else {}

    @property
    def front(self) -> tuple[str, int]:
        """Host and port that clients talk to."""
        part = self.plan["proxy"] or self.plan["engines"][0]
        return readiness.reachable(part["host"]), int(part["port"])

    def ports(self) -> list[int]:
        """Every port that the session binds."""
        return [port for _, numbers in self._named_ports() for port in numbers]

    def _named_ports(self) -> list[tuple[str, list[int]]]:
        """Who binds which ports."""
        proxy = self.plan["proxy"]
        here = (engine for engine in self.plan["engines"] if not engine.get("node"))
        parts = [*here, *([{**proxy, "name": "the proxy"}] if proxy else [])]
        services = [(service["name"], list(service["ports"])) for service in self.plan["services"]]
        return services + [(part["name"], [part["port"], *part["other_ports"]]) for part in parts]

    def records(self) -> list[dict[str, Any]]:
        """Plain data per process that was started."""
        found = []
        for child in self.children.values():
            part = self.part(child)
            found.append(
                {
                    "name": child.name,
                    "kind": child.kind,
                    "role": part.get("role"),
                    "host": readiness.reachable(part["host"]) if "host" in part else None,
                    "port": part.get("port"),
                    "process": str(child.process),
                    "log": str(child.log),
                    "started_s": round(child.started_s, 3),
                    "ended": None if child.status is None else ended_how(child.status),
                }
            )
        return found

    def note(self, step: str) -> None:
        """Keep the time of a step, in seconds since the session began."""
        self.times_s[step] = round(time.monotonic() - self.begun, 3)

    def family(self, child: Child) -> list[int]:
        """A child's pid and those of its descendants."""
        return [child.pid, *(stat.pid for stat in descendants(child.pid, all_processes()))]

    def note_shared(self) -> None:
        """Record shared memory that came up with the session: whoever is killed can't delete his own.

        To be called again and again while the session starts. Names that are no process's of ours are looked at once,
        and after that once a second: one may not be mapped yet, and others' maps are none of our business.
        """
        known = {**self._not_ours, **self.shared}
        fresh = {name: inode for name, inode in segments().items() if known.get(name) != inode}
        seen, when = self._looked_at
        if not fresh or (fresh == seen and time.monotonic() - when < SHARED_EVERY_S):
            return
        self._looked_at = (fresh, time.monotonic())
        if found := mapped((process.pid for process in self.everything()), fresh):
            self.shared |= found
            self.started()

    # -- start ------------------------------------------------------------------------------------------
    async def bring_up(self) -> None:
        """Everything from free ports to the first completion: services, engines in parallel, then the proxy.

        Raises:
            SessionError: why it did not come up.
        """
        self.check_ports()
        if self.plan["budget"]["kind"] == "gpus":
            # Of other nodes the process there takes care.
            here = (engine for engine in self.plan["engines"] if not engine.get("node"))
            devices = sorted({device for engine in here for device in engine["devices"]})
            self.memory_before_mib = gpu_memory.used_mib(devices)
        for name, text in self.plan["files"].items():
            write_text(self.folder / name, text)
        for service in self.plan["services"]:
            await self.service_ready(self.start(service["name"], "service", service))
        engines: list[Child] = []
        # The client starts with the first engines, whose start takes longer.
        client: Child | None = None
        for wave in waves([(_places(engine), engine["argv"]) for engine in self.plan["engines"]]):
            parts = [self.plan["engines"][index] for index in wave]
            started = [self.start(part["name"], "engine", part) for part in parts]
            waits = [self.engine_ready(child) for child in started]
            if client is None and self.client:
                client = self.start("client", "client", self.client)
                waits.append(self.client_ready(client))
            await self.all_of(waits)
            engines += started
        if self.plan["proxy"]:
            await self.http_ready(self.start("proxy", "proxy", self.plan["proxy"]))
            self.note("proxy")
        await proof.first_completions(self, engines)
        self.note("first_completion")
        self.note_shared()
        await proof.keep_facts(self, engines)
        self.note("facts")

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
            whose = next(name for name, numbers in self._named_ports() if port in numbers)
            raise SessionError(
                f"port {port} of {whose} is in use by {ports.holder(port)}",
                where=self.plan["layout"],
                mend="end that process, or choose another port for the layout",
            )

    def start(self, name: str, kind: str, part: dict[str, Any]) -> Child:
        """Start one process of the session."""
        marks = {SESSION_VARIABLE: self.id, STATE_VARIABLE: self.state}
        places = private_places(self.runtime, os.environ)
        env = child_environment(os.environ, {**places, **part["env"]}, part["argv"], marks)
        try:
            begun_s = time.monotonic() - self.begun
            child = spawn(name, kind, part["argv"], env, self.folder, begun_s, self._cores(part))
        except OSError as error:
            program = part["argv"][0]
            its_own = error.filename in (program, None)
            raise SessionError(
                f"{kind} {name} can't be started: {error.strerror}: {program if its_own else error.filename}",
                where=self.plan["layout"],
                mend="make the environment that its interpreter belongs to"
                if its_own
                else "make room, or mend the rights or the folder",
            ) from error
        self.children[child.pid] = child
        self.started()
        self.progress(f"{child.title}: started (pid {child.pid}, log {child.log})")
        return child

    def _cores(self, part: Mapping[str, Any]) -> Sequence[int]:
        """Cores that an engine is confined to, its API server included: otherwise it would use its neighbour's.

        Cores that this machine lacks are left out; the engine then says what it thinks of its binding.
        """
        if self.plan["budget"]["kind"] != "cores" or "devices" not in part or part.get("node"):
            return ()
        return sorted(set(part["devices"]) & os.sched_getaffinity(0))

    def failed(self, child: Child, why: str) -> SessionError:
        """The error for a process that did not come up."""
        return with_tail(
            f"{child.title} {why}",
            where=self.plan["layout"],
            mend=mend_for(child.log, child.status),
            log=child.log,
        )

    def check_alive(self) -> None:
        """Raise when a process of the session has ended."""
        for child in self.children.values():
            if child.status is not None:
                took_s = time.monotonic() - self.begun - child.started_s
                raise self.failed(child, f"{ended_how(child.status)} {took_s:.1f} s after its start")

    async def wait_for(
        self, child: Child, ready: Callable[[], Coroutine[Any, Any, bool]], limit_s: float
    ) -> None:
        """Wait until `ready()` or the limit, with an eye on all processes and a word every 15 s.

        Raises:
            TimeoutError: not ready within `limit_s`.
            SessionError: a process ended meanwhile.
        """

        async def condition() -> bool:
            self.check_alive()
            self.note_shared()
            good = await ready()
            self.check_alive()
            return good

        def waiting(waited_s: float) -> None:
            self.progress(f"{child.title}: not ready, {waited_s:.0f} s of at most {limit_s:.0f} s")

        await readiness.until(condition, limit_s, waiting)

    async def http_ready(self, child: Child) -> None:
        """Wait until a server is healthy; it must be ours, and serve the right model."""
        part = self.part(child)
        host, port, limit_s = part["host"], part["port"], float(part["startup_limit_s"])
        last = readiness.Answer(0, "not asked yet")

        async def healthy() -> bool:
            nonlocal last
            last = await readiness.ask(host, port, "/health")
            if last.status and ports.listened_by(port, self.family(child)) is False:
                self.check_alive()
                raise self.failed(child, f"shares port {port} with another process: {ports.holder(port)}")
            return last.status == 200

        try:
            await self.wait_for(child, healthy, limit_s)
        except TimeoutError:
            seen = f"HTTP {last.status}" if last.status else last.text
            raise self.failed(child, f"was not healthy within {limit_s:g} s (last: {seen})") from None
        answer = await readiness.ask(host, port, "/v1/models", limit_s=30.0)
        self.check_alive()
        names = readiness.model_ids(answer)
        wanted = self.plan["served_model"]
        if wanted not in names:
            said = ", ".join(names) if names else f"HTTP {answer.status} {answer.text[:200]}"
            raise self.failed(child, f"serves the wrong model: {wanted} wanted, {said} found")

    async def engine_ready(self, child: Child) -> None:
        """Wait for one engine and keep its time."""
        await self.http_ready(child)
        self.note(f"engine {child.name}")
        took_s = time.monotonic() - self.begun - child.started_s
        self.progress(f"engine {child.name}: healthy after {took_s:.1f} s")

    async def service_ready(self, child: Child) -> None:
        """Wait until a service answers on its health port, or its file is there."""
        part = self.part(child)
        limit_s = float(part["startup_limit_s"])

        async def ready() -> bool:
            if part["ready_file"] is not None and not Path(part["ready_file"]).exists():
                return False
            if part["health_port"] is None:
                return True
            port = int(part["health_port"])
            answer = await readiness.ask(part["host"], port, part["health_path"])
            if answer.status and ports.listened_by(port, self.family(child)) is False:
                self.check_alive()
                raise self.failed(child, f"shares port {port} with another process: {ports.holder(port)}")
            return answer.status == 200

        try:
            await self.wait_for(child, ready, limit_s)
        except TimeoutError:
            raise self.failed(child, f"was not ready within {limit_s:g} s") from None
        self.note(f"service {child.name}")

    async def client_ready(self, child: Child) -> None:
        """Wait until the warm benchmark client answers on its socket."""
        assert self.client is not None
        path, limit_s = Path(self.client["socket"]), float(self.client["startup_limit_s"])

        async def listens() -> bool:
            return await readiness.accepts(path)

        try:
            await self.wait_for(child, listens, limit_s)
        except TimeoutError:
            raise self.failed(child, f"was not ready within {limit_s:g} s") from None
        self.note("client")

    # -- life -------------------------------------------------------------------------------------------
    async def sickness(self, *, measuring: bool = False) -> str | None:
        """Ask every server whether it is well; None when all are, or are only slow.

        Args:
            measuring: engines may be under load. A proxy's bad health may then mean an engine that is slow
                to answer it, so that only the engines' own word counts.
        """
        for child in list(self.children.values()):
            part = self.part(child)
            port = part.get("port") or part.get("health_port")
            if port is None:
                continue
            answer = await readiness.ask(part["host"], port, part.get("health_path", "/health"), limit_s=10.0)
            # No answer in time is a busy engine; a refusal to connect is the end of its server.
            if measuring and child.kind == "proxy" and not answer.refused:
                continue
            if answer.status >= 500 or answer.refused:
                said = f"HTTP {answer.status}" if answer.status else answer.text
                return f"{child.title} is not healthy any more ({said}), log: {child.log}"
        return None

    def ended(self) -> str | None:
        """The first process that has ended, and how; None while all run."""
        for child in self.children.values():
            if child.status is not None:
                return f"{child.title} (pid {child.pid}) {ended_how(child.status)}, log: {child.log}"
        return None

    # -- end --------------------------------------------------------------------------------------------
    def everything(self) -> list[ProcessId]:
        """Every living process that came of this session."""
        below = descendants(os.getpid(), all_processes())
        return [ProcessId(stat.pid, stat.started) for stat in below if not stat.dead]

    async def tear_down(self) -> dict[str, Any]:
        """End all processes, and wait until ports and accelerator memory are free again.

        Returns:
            What it took (seconds since it began), who had to be killed, and what is held after all.
        """
        begun = time.monotonic()
        self.note_shared()

        def collect() -> None:
            reap(self.children)

        def strays() -> list[ProcessId]:
            return marked(self.state, self.id)

        leaders = [child.process for child in self.children.values() if child.status is None]
        ending = await end_processes(leaders, self.everything, self.plan["shutdown_grace_s"], reap=collect)
        if strays():  # none is expected: whatever we started is our descendant
            again = await end_processes([], strays, 0.0, reap=collect)
            ending = Ending(ending.took_s, ending.killed + again.killed, (*ending.left, *again.left))
        if ending.left:
            self.progress("can't be ended: " + ", ".join(f"pid {process.pid}" for process in ending.left))
        gone_s = time.monotonic() - begun
        # A session that started nothing holds nothing: a port in use was the reason why it did not start.
        mine = self.ports() if self.children else []
        while (held := ports.busy(mine)) and time.monotonic() - begun < gone_s + PORTS_FREE_LIMIT_S:
            await asyncio.sleep(0.05)
        free_s = time.monotonic() - begun
        memory = await gpu_memory.wait_until_back(self.memory_before_mib)
        for index, mib in memory.items():
            self.progress(f"GPU {index} still has {mib} MiB more in use than before this session")
        if self.client is not None:
            with contextlib.suppress(OSError):
                Path(self.client["socket"]).unlink(missing_ok=True)
        remove_runtimes(Path(self.state), self.id)
        if removed := remove_segments(self.shared):
            self.progress(f"shared memory left behind, deleted: {', '.join(removed)}")
        return {
            "processes_gone_s": round(gone_s, 3),
            "ports_free_s": round(free_s, 3),
            "memory_back_s": round(time.monotonic() - begun, 3),
            "killed": ending.killed,
            "left": [str(process) for process in ending.left],
            "ports_held": held,
            "memory_held_mib": memory,
        }
