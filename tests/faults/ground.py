# SPDX-License-Identifier: Apache-2.0
"""Where faults are tried: folders in which the real workflow runs on stubbed engines, and what must hold afterwards."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitbench.files import sha256_file
from splitbench.serving import ports
from splitbench.serving.leftovers import SHARED_MEMORY, segments
from splitbench.serving.processes import ProcessId, all_processes, command_line, descendants
from splitbench.serving.state import read_record, session_record
from tests.fakes.layouts import free_ports
from tests.workflow.flow import Flow, default_config, stub_python

RUN_LIMIT_S = 240.0
CELLS = 2


@dataclass
class Trial:
    """One fault, and what came of it.

    Args:
        fault: what is done, as the table says it.
        seed: of this trial's dice.
    """

    fault: str
    seed: str
    sees: list[str] = field(default_factory=list)
    kept: int = 0
    rerun: str = ""
    wrong: list[str] = field(default_factory=list)
    took_s: float = 0.0

    def check(self, holds: object, otherwise: str) -> None:
        """Something that must hold."""
        if not holds:
            self.wrong.append(otherwise)


class SkippedError(Exception):
    """This machine can't do that to itself."""


class Ground:
    """Makes working folders in which everything up to the cells has been done already.

    Args:
        base: an empty folder, with a short path.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.python = stub_python(base / "stub")
        self._made: dict[str, Flow] = {}

    @staticmethod
    def config(python: Path) -> dict[str, Any]:
        """One PD layout behind our own proxy, one workload, two cells of about two seconds."""
        config = default_config(python, free_ports(8)[0])
        config["layouts"] = {"pd": config["layouts"]["pd"]}
        config["workloads"] = {
            "short": {"input_tokens": 16, "output_tokens": 16, "prompts": {"per_concurrency": 6}}
        }
        config["engine"]["env"] |= {
            "VLLM_STUB_STEP_MS": "15",
            "VLLM_STUB_CORE": "1",
            "VLLM_STUB_LITTER": "1",
            "VLLM_STUB_STARTUP_S": "0.5",
        }
        return config

    def flow(self, name: str, upto: str = "check", folder: Path | None = None) -> Flow:
        """A folder of its own.

        Args:
            name: of the folder.
            upto: what has been done there: `check` (all but cells), `cells` or `all`.
            folder: where; default: below the base.
        """
        folder = folder or self.base / name
        if upto not in self._made:
            made = Flow(self.base / f"upto-{upto}", self.python, config=self.config(self.python))
            made.store = self.base / "store"
            target = {"check": ["check"], "cells": ["cells"], "all": []}[upto]
            done = made.run(*target, limit_s=RUN_LIMIT_S)
            assert done.returncode == 0, done.stdout + done.stderr
            self._made[upto] = made
        source = self._made[upto]
        shutil.copytree(source.folder / "results", folder / "results", dirs_exist_ok=True)
        found = Flow(folder, self.python, config=copy.deepcopy(source.config), store=source.store)
        found.config["node"]["base_port"] = free_ports(8)[0]
        return found


# -- looking on ----------------------------------------------------------------------------------------------
def wait_for(condition: Callable[[], object], what: str, limit_s: float = 90.0) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.02)


def phase(flow: Flow) -> str | None:
    """What the session is doing."""
    record = read_record(session_record(flow.state))
    return str(record["phase"]) if record else None


def measuring(flow: Flow, running: subprocess.Popen[str]) -> Callable[[], bool]:
    """Whether a cell's requests are being sent: its client writes a log; or the run has ended."""

    def look() -> bool:
        if running.poll() is not None:
            return True
        logs = list(flow.results.glob("logs/cells/**/*.client.log"))
        return phase(flow) == "ready" and any(path.stat().st_size for path in logs)

    return look


def victim(flow: Flow, name: str, snakemake: int) -> ProcessId | None:
    """A process of the run by its kind; None when there is none now."""
    if name == "snakemake":
        return ProcessId.of(snakemake)
    if name == "job":
        note = read_record(flow.state / "node.json")
        return ProcessId.parse(note["process"]) if note else None
    record = read_record(session_record(flow.state))
    if record is None or record["phase"] == "ended":
        return None
    supervisor = ProcessId.parse(record["supervisor"])
    if name == "supervisor":
        return supervisor
    if name == "engine's child":
        mains = {ProcessId.parse(each["process"]).pid for each in record["processes"]}
        below = [each for each in descendants(supervisor.pid, all_processes()) if not each.dead]
        children = [each for each in below if each.pid not in mains]
        return ProcessId(children[-1].pid, children[-1].started) if children else None
    started = [ProcessId.parse(each["process"]) for each in record["processes"] if each["kind"] == name]
    return started[-1] if started else None


# -- what must hold ------------------------------------------------------------------------------------------
def errors(output: str) -> list[str]:
    """What a person is told is wrong: our own lines, less the places of this machine."""
    found = []
    for line in re.findall(
        r"^splitbench: (error: .*|interrupted|.*(?:lost|killed|waiting).*)$", output, re.M
    ):
        line = re.sub(r"/[\w./+-]*/(?=[\w.+-]+)", "…/", line)
        line = re.sub(r"\b(pid|port) \d+", r"\1 N", line)
        line = re.sub(r"\b\d+(\.\d+)? s\b", "N s", line)
        line = re.sub(r"\(…/python .*?\)", "(its command)", line)
        if "(not tried again in this run)" in line:
            continue
        if line not in found:
            found.append(line)
    return found


def digests(flow: Flow, trial: Trial) -> dict[str, str]:
    """Digest of the result per complete cell; one that looks complete and is not goes into the trial."""
    found = {}
    for path in sorted(flow.results.glob("cells/*/*/*/*/record.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        cell = str(path.parent.relative_to(flow.results / "cells"))
        found[cell] = sha256_file(path.with_name("bench.json"))
        trial.check(found[cell] == record["bench_sha256"], f"{cell}: another result than the recorded one")
        whole = record["completed"] == record["prompts"]
        trial.check(whole, f"{cell}: {record['completed']} of {record['prompts']} prompts")
        for name in ("cell.json", "metrics.json", "engine_facts.json", "telemetry.json"):
            json.loads(path.with_name(name).read_text(encoding="utf-8"))
    return found


def nothing_left(flow: Flow, trial: Trial, when: str) -> None:
    """No process of the run, no port of its session."""
    left = flow.gone(40)
    trial.check(not left, f"{when}: processes left: {[command_line(pid)[:100] for pid in left]}")
    record = read_record(session_record(flow.state))
    held = ports.busy(record["ports"]) if record else []
    trial.check(not held, f"{when}: ports held: {[(port, ports.holder(port)) for port in held]}")


def ended(flow: Flow, trial: Trial, running: subprocess.Popen[str], *, fails: bool = True) -> str:
    """The run comes to its end; what it said goes into the trial.

    Args:
        fails: whether it must (True), or must not; what must never be there is a traceback.
    """
    try:
        code = running.wait(timeout=RUN_LIMIT_S)
    except subprocess.TimeoutExpired:
        trial.wrong.append("the run did not come to an end")
        running.kill()
        code = running.wait()
    output = (flow.folder / "run.log").read_text(encoding="utf-8", errors="replace")
    told(trial, output)
    trial.check((code != 0) == fails, f"exit code {code}, {'not 0' if fails else '0'} expected")
    return output


def told(trial: Trial, output: str) -> None:
    """Keep what a person was told, and see that it is fit to be told."""
    trial.sees += [line for line in errors(output) if line not in trial.sees]
    if "Traceback" in output:
        # Snakemake's own, where it can't write what it keeps for itself, is not ours to mend.
        ours = re.search(r'File "[^"]*/(splitbench|scripts)/', output) is not None
        trial.check(not ours, f"a traceback: {output[-3000:]}")
        trial.sees.append("(a traceback of Snakemake, which can't write its own notes)")
    longest = max(map(len, output.splitlines()), default=0)
    trial.check(longest < 4000, f"a line of {longest} characters")


def rerun(flow: Flow, trial: Trial, *targets: str, unlock: bool = False, cells: int = CELLS) -> None:
    """The same command finishes, measures only what is missing, and leaves nothing behind."""
    nothing_left(flow, trial, "after the fault")
    before = digests(flow, trial)
    steps = []
    if unlock:
        refused = flow.run(*targets, limit_s=RUN_LIMIT_S)
        if "--unlock" in refused.stdout + refused.stderr:
            flow.run("--unlock", *targets)
            steps.append("says that the folder is locked; after `snakemake --unlock`")
    done = flow.run(*targets, limit_s=RUN_LIMIT_S)
    trial.check(done.returncode == 0, f"the rerun failed: {(done.stdout + done.stderr)[-3000:]}")
    nothing_left(flow, trial, "after the rerun")
    after = digests(flow, trial)
    trial.kept = sum(after.get(cell) == value for cell, value in before.items())
    trial.check(len(after) == cells, f"the rerun finished with {len(after)} of {cells} cells")
    trial.check(trial.kept == len(before), f"{len(before) - trial.kept} complete cells were measured again")
    steps.append(f"measures {len(after) - trial.kept} of {cells} cells")
    trial.rerun = " ".join(steps)
    trial.check(flow.planned(*targets) == {}, "a further run would do something")
    aside = [
        str(path.relative_to(flow.folder))
        for pattern in ("**/*.part", "**/.cell-*")
        for path in flow.results.glob(pattern)
    ]
    trial.check(not aside, f"half-written files: {aside}")
    runtimes = [str(path) for path in flow.state.glob("run-*")]
    trial.check(not runtimes, f"folders for sockets left: {runtimes}")


def stub_segments() -> set[str]:
    """Shared memory of stubs that is there now."""
    return {name for name in segments() if name.startswith("psm_stub_")}


def forget_segments(names: set[str]) -> None:
    """Delete what a fault left on purpose."""
    for name in names:
        (SHARED_MEMORY / name).unlink(missing_ok=True)


# -- a small disk --------------------------------------------------------------------------------------------
class SmallDisk:
    """A tmpfs of its own; needs root.

    Raises:
        SkippedError: this user may not mount.
    """

    def __init__(self, folder: Path, mib: int = 64) -> None:
        folder.mkdir(parents=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=700", "none", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            folder.rmdir()
            raise SkippedError(f"mount: {done.stderr.strip()}")
        self.folder = folder

    def fill(self) -> None:
        """Take all room that is left."""
        with (self.folder / "filler").open("wb", buffering=0) as handle:
            size = 2**20
            while size:
                try:
                    handle.write(b"\0" * size)
                except OSError:
                    size //= 2

    def free(self) -> None:
        """Give it back."""
        (self.folder / "filler").unlink(missing_ok=True)

    def writable(self, yes: bool) -> bool:
        """Change whether it may be written to; False while somebody has a file open for writing."""
        how = "rw" if yes else "ro"
        return (
            subprocess.run(
                ["mount", "-o", f"remount,{how}", str(self.folder)], capture_output=True, check=False
            ).returncode
            == 0
        )

    def close(self) -> None:
        """Unmount, also while somebody still looks at it."""
        subprocess.run(["umount", "-l", str(self.folder)], check=False)


def home_of_clock(base: Path) -> Path:
    """Build the library that moves the wall clock of what loads it.

    Raises:
        SkippedError: there is no C compiler.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SkippedError("no C compiler")
    library = base / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def kill_all(pids: list[int]) -> None:
    """SIGKILL to processes that carry this folder's mark."""
    for pid in pids:
        process = ProcessId.of(pid)
        if process is not None:
            process.signal(9)
