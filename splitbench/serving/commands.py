# SPDX-License-Identifier: Apache-2.0
"""Sessions by hand: `up`, `status`, `down` and `logs`, for looking at a layout before a sweep.

`add_commands` puts the four on a command line, `run` does them. `up` takes a plan (as `snakemake plans`
writes it) or whatever the caller makes a `SessionRequest` from; such a session has no owner and stays until
`down`, or until a workflow wants the node.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from splitbench.console import say
from splitbench.errors import UserError
from splitbench.serving.failures import log_tail
from splitbench.serving.plan import Plan
from splitbench.serving.session import Places, SessionRequest, acquire, node_lock, status, stop
from splitbench.serving.state import state_folder

Write = Callable[[str], Any]


def add_commands(commands: Any, *, up: bool = True) -> None:
    """Add the commands to an argparse sub-parser collection.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
        up: with `up PLAN.json`; False where the caller adds an `up` of its own and calls `bring_up`.
    """
    if up:
        parser = commands.add_parser("up", help="start the layout of a plan and leave it up")
        parser.add_argument("plan", type=Path, help="JSON file of a launch plan")
        parser.add_argument("--serving-python", type=Path, required=True, help="interpreter that has vllm")
        parser.add_argument("--model", required=True, help="folder or hub name of the model")
        parser.add_argument("--log-folder", type=Path, default=Path("logs", "sessions"))
    parser = commands.add_parser("status", help="what is up on this node, and who measures")
    parser.add_argument("--json", action="store_true", help="everything that is known, as JSON")
    commands.add_parser("down", help="end the session that is up, and wait until nothing of it is left")
    parser = commands.add_parser("logs", help="show the logs of the session that is up, or was the last")
    parser.add_argument("name", nargs="?", help="of this process only (an engine's name, proxy, client)")
    parser.add_argument("-n", "--lines", type=int, default=40, help="the last so many lines (default 40)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until interrupted")


def run(options: argparse.Namespace, write: Write = sys.stdout.write) -> int:
    """Do the command that was parsed (`options.command`); returns the exit code.

    Raises:
        UserError: as the functions below.
    """
    if options.command == "up":
        bring_up(plan_request(options), write)
    elif options.command == "status":
        write(status_text(as_json=options.json))
    elif options.command == "down":
        ended = stop(progress=say)
        write("ended\n" if ended else "nothing is up\n")
    elif options.command == "logs":
        show_logs(options.name, options.lines, options.follow, write)
    return 0


def plan_request(options: argparse.Namespace) -> SessionRequest:
    """The request of `up PLAN.json`.

    Raises:
        UserError: the file is no plan.
    """
    try:
        plan = Plan.model_validate_json(options.plan.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"can't be read: {error.strerror}", where=str(options.plan)) from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole"
        raise UserError(
            f"{first['msg']}", where=f"{options.plan}: {key}", mend="name a plan that the workflow wrote"
        ) from error
    places = Places(
        serving_python=options.serving_python,
        workflow_python=Path(sys.executable),
        repository=Path(__file__).resolve().parents[2],
        model=options.model,
    )
    return SessionRequest(
        plan=plan,
        restart=0,
        places=places,
        log_folder=options.log_folder,
        owner=None,
        idle_limit_s=None,
    )


def bring_up(request: SessionRequest, write: Write = sys.stdout.write) -> None:
    """Start a session and leave it up, after any measurement that has the node now.

    Raises:
        SessionError: it did not start.
    """

    state = state_folder()
    with node_lock(state, f"splitbench up {request.plan.layout}", say):
        session = acquire(request, say, state=state)
    write(f"up at {session.front_url}, logs in {session.folder}\n")
    session.close()


def status_text(*, as_json: bool = False) -> str:
    """What is up on this node, for people or (everything) as JSON."""
    now = status()
    if as_json:
        return json.dumps(now, indent=2, sort_keys=True) + "\n"
    session = now["session"]
    lines = []
    if session is None or not now["supervisor"]:
        lines.append("nothing is up")
        if session is not None:
            lines.append(f"  last: {session['label']}, {session['reason'] or 'its supervisor was killed'}")
        leftovers = [each for each in (session or {}).get("processes", []) if each["alive"]]
        if leftovers:
            lines.append(
                f"  still running of it: {len(leftovers)} of its processes; splitbench down ends them"
            )
    else:
        age_s = time.time() - session["started_at"]
        owner = f"owner pid {session['owner'].partition(':')[0]}" if session["owner"] else "started by hand"
        front = "http://{}:{}".format(*session["front"])
        lines.append(f"{session['label']}: {session['phase']}, {age_s:.0f} s old, {owner}, at {front}")
        for each in session["processes"]:
            pid = each["process"].partition(":")[0]
            where = f"port {each['port']}" if each["port"] else ""
            lines.append(
                f"  {each['name']:12s} {each['role'] or '':11s} pid {pid:8s} {where:11s} {each['log']}"
            )
    if now["measuring"]:
        lines.append(f"measuring: {now['measuring']}")
    if now["progress"]:
        lines.append(f"  {now['progress']['line']}")
    return "\n".join(lines) + "\n"


def show_logs(name: str | None, lines: int, follow: bool, write: Write = sys.stdout.write) -> None:
    """The last lines of the session's logs, then (`follow`) what is written from now on.

    Raises:
        UserError: there was no session here yet, or none of its processes has that name.
    """
    session = status()["session"]
    if session is None:
        raise UserError("no session was started on this node yet", mend="splitbench up PLAN starts one")
    logs = {each["name"]: Path(each["log"]) for each in session["processes"]}
    logs["supervisor"] = Path(session["folder"]) / "supervisor.log"
    if name is not None:
        if name not in logs:
            raise UserError(f"{name!r} is none of its processes", mend=f"choose from {', '.join(logs)}")
        logs = {name: logs[name]}
    places = {}
    for each, path in logs.items():
        mark = "" if len(logs) == 1 else f"{each} | "
        places[path] = (mark, path.stat().st_size if path.exists() else 0)
        for line in log_tail(path, lines):
            write(f"{mark}{line}\n")
    while follow:
        time.sleep(0.25)
        for path, (mark, place) in places.items():
            if path.exists() and path.stat().st_size > place:
                with path.open("rb") as handle:
                    handle.seek(place)
                    text = handle.read()
                whole = text.rpartition(b"\n")[0]
                if whole:
                    places[path] = (mark, place + len(whole) + 1)
                    for line in whole.decode("utf-8", errors="replace").split("\n"):
                        write(f"{mark}{line}\n")


def main(arguments: list[str] | None = None) -> int:
    """`python -m splitbench.serving.commands up|status|down|logs`."""
    parser = argparse.ArgumentParser(prog="splitbench")
    add_commands(parser.add_subparsers(dest="command", required=True))
    try:
        return run(parser.parse_args(arguments))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
