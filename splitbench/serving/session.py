# SPDX-License-Identifier: Apache-2.0
"""The lease of a session: ask for a layout to be up, and get the one that is, or a new one.

A cell takes the node's lock, acquires its session, measures, and lets go; the session stays up for the next
cell. Which session it needs is said by the plan's digest, the restart's number, the places that fill the
plan, the stack, the client and the owner: the same -> reused; another one up -> that is ended first, wholly,
then the wanted one started.

    with node_lock(state, "cell agg/long/c8/0-0", progress), acquire(request, progress) as session:
        ...
        if (reason := session.lost()) is not None: ...
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import splitbench
from splitbench.files import digest, write_json
from splitbench.serving.ending import clean_leftovers, greeted, status, stop, wait_for_link
from splitbench.serving.failures import SessionError, log_tail
from splitbench.serving.launch import dropped
from splitbench.serving.leftovers import choose_runtime
from splitbench.serving.link import Link
from splitbench.serving.plan import Plan, fill, filled
from splitbench.serving.state import Owner, node_lock, poisoned, read_record, state_folder
from splitbench.serving.supervisor import EXIT_LOCKED

__all__ = [
    "ClientPlan",
    "Owner",
    "Places",
    "Session",
    "SessionError",
    "SessionRequest",
    "acquire",
    "node_lock",
    "state_folder",
    "status",
    "stop",
]

IDLE_LIMIT_S = 300.0


@dataclass(frozen=True)
class Places:
    """Where things are on this machine: what fills a plan's placeholders."""

    serving_python: Path
    workflow_python: Path
    repository: Path
    model: str
    nodes: tuple[str, ...] = ()

    def values(self) -> dict[str, str]:
        """Values of the placeholders; relative paths made absolute: engines have a working folder of theirs.

        Symbolic links are kept: an environment's interpreter is one, and works only under its own name.
        """
        model = str(Path(self.model).absolute()) if Path(self.model).exists() else self.model
        return {
            "serving_python": str(self.serving_python.absolute()),
            "workflow_python": str(self.workflow_python.absolute()),
            "repository": str(self.repository.absolute()),
            "model": model,
            **{f"node{number}": address for number, address in enumerate(self.nodes)},
        }


@dataclass(frozen=True)
class ClientPlan:
    """A benchmark client that is kept warm beside the engines, as long as they live.

    It is ready when it accepts connections on a Unix socket, whose path stands in for `{client_socket}` in
    `argv` and `env`; the plan's placeholders are filled too.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    startup_limit_s: float = 300.0


@dataclass(frozen=True)
class SessionRequest:
    """Which session is wanted, and for whom.

    Args:
        plan: the layout's launch plan.
        restart: number of the session among those of this layout; another number is another session.
        places: what fills the plan's placeholders.
        log_folder: gets a folder per session, with a log per process, the plan's files and the session's
        record.
        owner: when this process has gone the session ends; None: it stays until it is stopped.
        client: a warm benchmark client; None: there is none.
        stack: digest of the serving environment, since the same path may hold another one later.
        idle_limit_s: unused for so long, it ends; None: never. Unused means that no `Session` of it is open.
    """

    plan: Plan
    restart: int
    places: Places
    log_folder: Path
    owner: Owner | None
    client: ClientPlan | None = None
    stack: str = ""
    idle_limit_s: float | None = IDLE_LIMIT_S

    def _what(self) -> dict[str, Any]:
        client = self.client
        return {
            "plan": self.plan.digest,
            "places": self.places.values(),
            "stack": self.stack,
            "client": {"argv": client.argv, "env": client.env} if client else None,
        }

    @property
    def identity(self) -> str:
        """Equal for requests that the same session can serve."""
        return digest({**self._what(), "restart": self.restart, "owner": str(self.owner)})

    @property
    def poison_key(self) -> str:
        """Equal for requests that would fail to start in the same way."""
        return digest(self._what())

    @property
    def label(self) -> str:
        """The session's name for people."""
        return f"{self.plan.layout}-{self.plan.digest[:8]} restart {self.restart}"


@dataclass(frozen=True)
class Server:
    """A process of a session that answers HTTP."""

    name: str
    role: str
    url: str
    pid: int
    log: Path


class Session:
    """A layout that is up, leased to the caller until `close`."""

    def __init__(self, record: dict[str, Any], link: Link, *, reused: bool) -> None:
        self._link = link
        self._lost: str | None = None
        self._well = False
        self._monotonic = float(record["started_monotonic"])
        servers = [
            Server(
                each["name"],
                each["role"] or each["kind"],
                f"http://{each['host']}:{each['port']}",
                int(each["process"].partition(":")[0]),
                Path(each["log"]),
            )
            for each in record["processes"]
            if each["port"] is not None
        ]
        self.id = str(record["id"])
        self.reused = reused
        self.started_at = float(record["started_at"])
        self.folder = Path(record["folder"])
        self.front_url = "http://{}:{}".format(*record["front"])
        self.engines = tuple(server for server in servers if server.role != "proxy")
        self.proxy = next((server for server in servers if server.role == "proxy"), None)
        self.client_socket = Path(record["client_socket"]) if record["client_socket"] else None
        self.times_s: dict[str, float] = dict(record["times_s"])
        self.record = record

    @property
    def age_s(self) -> float:
        """Seconds since the session's start began."""
        return time.monotonic() - self._monotonic

    def lost(self) -> str | None:
        """Why the session can't be measured any more; None while it can. Costs one system call."""
        if self._lost is None:
            for message in self._link.pending():
                if message["event"] in ("lost", "ended"):
                    self._lost = self._lost or str(message["reason"])
                self._well = self._well or message["event"] == "well"
            if self._lost is None and self._link.closed:
                self._lost = "its supervisor has gone"
        return self._lost

    def confirm(self, limit_s: float = 60.0) -> str | None:
        """Have every server of the session asked once more: None when all are well, else why not.

        What `lost` says may be some milliseconds behind; after a measurement this makes sure that nothing had
        died when it ended.
        """
        if self.lost() is None:
            self._link.send(op="check")
        deadline = time.monotonic() + limit_s
        while self.lost() is None:
            if self._well:
                self._well = False
                return None
            left = deadline - time.monotonic()
            if left <= 0:
                return f"its supervisor did not answer within {limit_s:g} s"
            self._link.wait(left)
        return self._lost

    def close(self) -> None:
        """Let go of the session; it stays up for the next one who wants it."""
        self._link.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- acquire -------------------------------------------------------------------------------------------------
def acquire(
    request: SessionRequest, progress: Callable[[str], None], *, state: Path | None = None
) -> Session:
    """The session that was asked for: the one that is up, or a new one after ending what else is up.

    To be called with the node's lock held. Blocks until the session has answered a first completion.

    Args:
        progress: gets a line for people per step, and every 15 s while a step takes long.
        state: the state folder; None: `state_folder()`.

    Raises:
        SessionError: it did not start: which process, why, the end of its log, what to try. The same error
            comes at once when this plan has failed for this owner before.
    """
    state = state_folder() if state is None else state
    known = poisoned(state, request.owner, request.poison_key)
    if known is not None:
        raise SessionError.from_record(known, note=" (not tried again in this run)")
    while True:
        link = Link.open(state)
        if link is None:
            if wait_for_link(state, progress):
                continue
            clean_leftovers(state, progress)
            started = _start(request, state, progress)
            if started is None:
                continue
            return started
        record = greeted(link, state, progress)
        if record is None:
            continue
        if record["identity"] == request.identity and record["phase"] in ("starting", "ready"):
            link.send(op="attach")
            session = _await_ready(link, state, request, Path(record["folder"]), progress, reused=True)
            if session is not None:
                return session
            continue
        link.close()
        progress(f"ending session {record['label']}, to start {request.label}")
        stop(state, progress=progress, reason=f"{request.label} is wanted")


def _await_ready(
    link: Link,
    state: Path,
    request: SessionRequest,
    folder: Path,
    progress: Callable[[str], None],
    *,
    reused: bool,
) -> Session | None:
    """Wait until the session in `folder` is up.

    Returns:
        The session; None when one that was to be reused turned out to be broken and has ended.

    Raises:
        SessionError: it did not start.
    """
    while not link.closed:
        for message in link.messages(None):
            if message["event"] == "progress":
                progress(message["text"])
            elif message["event"] == "ready":
                return Session(message["record"], link, reused=reused)
    link.close()
    wait_for_link(state, progress)  # its last breath
    # What it had to say is in its record, should it have ended before it knew of us.
    record = read_record(folder / "session.json") or {}
    if record.get("failure"):
        raise SessionError.from_record(record["failure"])
    why = record.get("reason") or "its supervisor has gone"
    if reused:
        progress(f"the session that was up is lost: {why}")
        return None
    clean_leftovers(state, progress)
    raise SessionError(
        f"ended while it was being started: {why}",
        where=request.plan.layout,
        mend=f"run it again; log: {folder / 'supervisor.log'}",
    )


def _start(request: SessionRequest, state: Path, progress: Callable[[str], None]) -> Session | None:
    """Start a supervisor with the session, and wait until that is up; None when somebody else was faster."""
    ident = secrets.token_hex(8)
    layout = re.sub(r"[^\w.+-]", "_", request.plan.layout)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = request.log_folder.absolute() / (
        f"{layout}-{request.plan.digest[:8]}.r{request.restart}.{stamp}-{ident[:6]}"
    )
    folder.mkdir(parents=True)
    client_socket = state / f"client-{ident[:8]}.sock"
    runtime = choose_runtime(state, ident)
    values = {**request.places.values(), "session": str(folder), "runtime": str(runtime)}
    client = None
    if request.client is not None:
        client = {
            "argv": [_fill_client(text, values, client_socket) for text in request.client.argv],
            "env": {k: _fill_client(v, values, client_socket) for k, v in request.client.env.items()},
            "socket": str(client_socket),
            "startup_limit_s": request.client.startup_limit_s,
        }
    content = {
        "id": ident,
        "identity": request.identity,
        "poison_key": request.poison_key,
        "label": request.label,
        "plan_digest": request.plan.digest,
        "restart": request.restart,
        "owner": str(request.owner) if request.owner else None,
        "idle_s": request.idle_limit_s,
        "state": str(state),
        "folder": str(folder),
        "runtime": str(runtime),
        "plan": filled(request.plan, values),
        "client": client,
    }
    write_json(folder / "request.json", content)
    unseen = dropped(os.environ)
    if unseen:
        progress(f"not passed on to engines (set them in the layout's env): {', '.join(unseen)}")
    progress(f"starting session {request.label}, logs in {folder}")
    log = folder / "supervisor.log"
    package_folder = str(Path(splitbench.__file__).resolve().parents[1])
    with log.open("ab") as output:
        code = subprocess.run(
            [sys.executable, "-m", "splitbench.serving.supervisor", str(folder / "request.json")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=os.sep,
            env={**os.environ, "PYTHONPATH": package_folder},
            close_fds=True,
            check=False,
        ).returncode
    if code == EXIT_LOCKED:
        return None
    if code != 0:
        raise SessionError(
            f"the supervisor did not start (exit code {code})",
            where=request.plan.layout,
            mend=f"read {log}",
            tail="\n".join(f"    {line}" for line in log_tail(log)),
        )
    link = Link.open(state) or Link.dead()
    link.send(op="attach")
    return _await_ready(link, state, request, folder, progress, reused=False)


def _fill_client(text: str, values: dict[str, str], client_socket: Path) -> str:
    return fill(text.replace("{client_socket}", str(client_socket)), values)
