# SPDX-License-Identifier: Apache-2.0
"""An engine on another node: a process here that stands for it, and one there that looks after it.

    python -m splitbench.cluster.remote --node 1 --ports 17101,17102 --gpus 0,1 COMMAND...

The one here is what the session's supervisor started: it starts a step of SLURM on the node and lives as long as that.
Asked to end (TERM), it closes the step's standard input. The one there is the node's own supervisor: it starts the
command as its child, and ends it with all that came of it when the input is closed, when it is signalled, or when
its slurmd's step manager dies; then it waits until ports and GPU memory are free again.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitbench.cluster.allocation import node_names
from splitbench.errors import UserError
from splitbench.serving import gpu_memory, ports
from splitbench.serving.launch import become_subreaper
from splitbench.serving.processes import ProcessId, all_processes, descendants, end_processes

GRACE_S = 15.0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Either side; the exit code is the command's."""
    parser = argparse.ArgumentParser(prog="python -m splitbench.cluster.remote", description=__doc__)
    parser.add_argument("--node", type=int, help="which node of the allocation")
    parser.add_argument("--ports", type=_numbers, default=[], help="what the command binds there")
    parser.add_argument("--gpus", type=_numbers, default=[])
    parser.add_argument("--cores", type=_numbers, default=[])
    parser.add_argument("--there", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    if arguments.there is not None:
        return There(json.loads(arguments.there.read_text(encoding="utf-8")), arguments.there).run()
    try:
        name = node_names(os.environ)[arguments.node]
    except (UserError, IndexError) as error:
        _say(f"node {arguments.node}: {error}")
        return 1
    return here(name, arguments)


# -- here ------------------------------------------------------------------------------------------------------
def here(node: str, arguments: argparse.Namespace) -> int:
    """Start the step on the node and stand for it."""
    request = Path.cwd() / f"remote-{arguments.ports[0]}.json"
    content = {
        "command": arguments.command,
        "env": dict(os.environ),
        "folder": str(Path.cwd()),
        **{key: getattr(arguments, key) for key in ("ports", "gpus", "cores")},
    }
    # Private, and gone once it is read: the environment may hold what is nobody else's business.
    handle = os.open(request, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(content, file)
    step = subprocess.Popen(
        [
            *(
                "srun",
                "--overlap",
                "--nodes=1",
                "--ntasks=1",
                f"--nodelist={node}",
                "--mem=0",
                "--unbuffered",
            ),
            *("--export=ALL", "--job-name=engine", "--kill-on-bad-exit=1", "--input=0"),
            *(sys.executable, "-m", "splitbench.cluster.remote", "--there", str(request)),
        ],
        stdin=subprocess.PIPE,
        # Of its own, since srun kills its tasks at once where it gets a TERM.
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )

    def end(*_: Any) -> None:
        if step.stdin is not None and not step.stdin.closed:
            step.stdin.close()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    code = step.wait()
    request.unlink(missing_ok=True)
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


# -- there -----------------------------------------------------------------------------------------------------
class There:
    """The node's supervisor of one command."""

    def __init__(self, request: dict[str, Any], file: Path) -> None:
        self.request = request
        file.unlink(missing_ok=True)
        self.asked = False

    def run(self) -> int:
        """From the command's start until nothing of it is left; its exit code."""
        become_subreaper()
        _die_with_parent()
        for port in ports.busy(self.request["ports"]):
            _say(f"port {port} is in use here by {ports.holder(port)}")
            return 1
        if self.request["cores"]:
            os.sched_setaffinity(0, self.request["cores"])
        before = gpu_memory.used_mib(self.request["gpus"])
        waking, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # SLURM has put its own choice of GPUs into the environment; the plan's counts.
        child = subprocess.Popen(
            self.request["command"],
            env=_with_tools(self.request["env"], self.request["command"][0]),
            cwd=self.request["folder"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        while child.poll() is None and not self.asked:
            ready, _, _ = select.select([waking, 0], [], [], 5.0)
            if 0 in ready and not os.read(0, 4096):
                self.asked = True
            if waking in ready:
                os.read(waking, 4096)
        leader = ProcessId.of(child.pid)
        ending = asyncio.run(
            end_processes([leader] if leader else [], _everything, GRACE_S, reap=lambda: _reap(child))
        )
        deadline = time.monotonic() + 3.0
        while ports.busy(self.request["ports"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for index, mib in asyncio.run(gpu_memory.wait_until_back(before)).items():
            _say(f"GPU {index} still has {mib} MiB more in use than before")
        code = child.returncode if child.returncode is not None else 1
        _say(f"ended after {ending.took_s:.1f} s, {ending.killed} killed")
        return code if code >= 0 else 128 - code

    def _ask(self, *_: Any) -> None:
        self.asked = True


def _with_tools(env: dict[str, str], program: str) -> dict[str, str]:
    """The environment with the program's own folder first in PATH, as it would be on the first node."""
    folder = str(Path(program).parent)
    return env | {"PATH": os.pathsep.join(part for part in (folder, env.get("PATH", os.defpath)) if part)}


def _everything() -> list[ProcessId]:
    below = descendants(os.getpid(), all_processes())
    return [ProcessId(stat.pid, stat.started) for stat in below if not stat.dead]


def _reap(child: subprocess.Popen[bytes]) -> None:
    child.poll()
    while True:
        try:
            # The child itself is left to its Popen, which keeps its status.
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid == child.pid:
            return
        os.waitpid(found.si_pid, os.WNOHANG)


if __name__ == "__main__":
    sys.exit(main())
