# SPDX-License-Identifier: Apache-2.0
"""Faults of the machine under a run: killed processes, full and read-only disks, a clock that jumps, lost power."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from splitbench.serving.processes import all_processes, descendants
from tests.faults.ground import (
    Ground,
    SmallDisk,
    Trial,
    digests,
    ended,
    forget_segments,
    home_of_clock,
    kill_all,
    measuring,
    nothing_left,
    phase,
    rerun,
    stub_segments,
    told,
    victim,
    wait_for,
)
from tests.workflow.flow import Flow

Scenario = Callable[[Ground, Trial, random.Random], None]
VICTIMS = ("snakemake", "job", "supervisor", "engine", "engine's child", "proxy", "client")
STAGES = {"bring-up": "starting", "cell": "ready", "tear-down": "stopping"}


# -- kill -9 -------------------------------------------------------------------------------------------------
def kill(name: str) -> Scenario:
    """SIGKILL to one kind of process, once in every stage of a run."""

    def scenario(ground: Ground, trial: Trial, dice: random.Random) -> None:
        kept, said = 0, []
        for stage, session_phase in STAGES.items():
            before = stub_segments()
            flow = ground.flow(f"kill-{name.replace(' ', '-')}-{stage}")
            running = flow.start("cells")
            hit = _strike(flow, running, name, session_phase, dice)
            # What is killed at the very end may have done its work already.
            code = running.wait(timeout=240)
            told(trial, (flow.folder / "run.log").read_text(encoding="utf-8"))
            if hit and stage != "tear-down":
                trial.check(code != 0, f"{stage}: exit code 0")
            trial.check(hit or stage == "tear-down", f"{stage}: there was no {name}")
            rerun(flow, trial, "cells", unlock=name == "snakemake")
            kept += trial.kept
            said.append(f"{stage}: {trial.rerun}" if hit else f"{stage}: (none there)")
            if name == "supervisor" and stage == "bring-up":
                forget_segments(stub_segments() - before)
            shutil.rmtree(flow.folder, ignore_errors=True)
        trial.kept, trial.rerun = kept, "; ".join(said)

    return scenario


def _strike(
    flow: Flow, running: subprocess.Popen[str], name: str, session_phase: str, dice: random.Random
) -> bool:
    """Wait for the stage and the victim, a little longer, and kill it."""
    order = ["starting", "ready", "stopping", "ended"]

    def there() -> bool:
        now = phase(flow)
        return now in order and order.index(now) >= order.index(session_phase)

    wait_for(lambda: running.poll() is not None or there(), session_phase)
    if session_phase == "ready":
        wait_for(measuring(flow, running), "a cell")
    if session_phase != "stopping":
        time.sleep(dice.uniform(0.0, 0.3))
        wait_for(
            lambda: running.poll() is not None or victim(flow, name, running.pid) is not None, name, 20.0
        )
    found = victim(flow, name, running.pid)
    return found is not None and running.poll() is None and found.signal(signal.SIGKILL)


def kill_later_job(ground: Ground, trial: Trial, dice: random.Random) -> None:
    """SIGKILL to the job that makes tables, statistics, a figure or the report."""
    said = []
    for script in ("part.py", "tables.py", "statistics.py", "figure.py", "report.py"):
        flow = ground.flow(f"later-{script.partition('.')[0]}", "cells")
        before = digests(flow, trial)
        running = flow.start()
        hit = False
        while running.poll() is None and not hit:
            for stat in descendants(running.pid, all_processes()):
                try:
                    words = Path(f"/proc/{stat.pid}/cmdline").read_bytes()
                except OSError:
                    continue
                # Snakemake runs a copy of the script, whose name ends with that of the rule's.
                if script.encode() in words.split(b"\0")[-2 if words.endswith(b"\0") else -1]:
                    time.sleep(dice.uniform(0.0, 0.8))
                    kill_all([stat.pid])
                    hit = True
                    break
            time.sleep(0.02)
        running.wait(timeout=240)
        told(trial, (flow.folder / "run.log").read_text(encoding="utf-8"))
        trial.check(hit, f"there was no {script}")
        rerun(flow, trial)
        trial.check(digests(flow, trial) == before, "a cell was measured again")
        trial.check((flow.results / "report.html").is_file(), "no report")
        said.append(script.partition(".")[0])
        shutil.rmtree(flow.folder, ignore_errors=True)
    trial.rerun = f"makes what is missing ({', '.join(said)}), measures nothing"


def power_loss(ground: Ground, trial: Trial, dice: random.Random) -> None:
    """Everything is killed at once, and what a reboot clears is gone: the state folder, sockets, shared memory."""
    flow = ground.flow("power")
    before = stub_segments()
    running = flow.start("cells")
    wait_for(measuring(flow, running), "a cell")
    wait_for(
        lambda: list(flow.results.glob("cells/*/*/*/*/record.json")) or running.poll() is not None, "one cell"
    )
    time.sleep(dice.uniform(0.0, 2.0))
    pids = [running.pid, *flow.ours()]
    kill_all(pids)
    running.wait(timeout=60)
    wait_for(lambda: kill_all(flow.ours()) or not flow.ours(), "the end", 20.0)
    for link in flow.state.glob("run-*"):
        shutil.rmtree(link.resolve(), ignore_errors=True)
    shutil.rmtree(flow.state)
    flow.state.mkdir(mode=0o700)
    forget_segments(stub_segments() - before)
    trial.sees.append("(the machine went down)")
    rerun(flow, trial, "cells", unlock=True)


# -- disks ---------------------------------------------------------------------------------------------------
@contextmanager
def _on_small_disk(
    ground: Ground, name: str, part: str, upto: str = "check"
) -> Iterator[tuple[Flow, SmallDisk]]:
    folder = ground.base / name
    disk = SmallDisk(folder / part if part else folder)
    try:
        yield ground.flow(name, upto, folder), disk
    finally:
        disk.close()


def disk_full(part: str, stage: str) -> Scenario:
    """The disk of `part` ("results", "state" or, as "", all) has no room from `stage` on."""

    def scenario(ground: Ground, trial: Trial, dice: random.Random) -> None:
        upto = "cells" if stage == "tables" else "check"
        targets = [] if stage == "tables" else ["cells"]
        with _on_small_disk(ground, f"full-{part or 'all'}-{stage}", part, upto) as (flow, disk):
            if stage in ("start", "tables"):
                flow.command(*targets)  # the config's own file is the user's
                disk.fill()
            running = flow.start(*targets)
            if stage == "bring-up":
                wait_for(lambda: phase(flow) == "starting" or running.poll() is not None, "bring-up")
                disk.fill()
            elif stage == "cell":
                wait_for(measuring(flow, running), "a cell")
                time.sleep(dice.uniform(0.0, 0.5))
                disk.fill()
            ended(flow, trial, running)
            nothing_left(flow, trial, "on the full disk")
            disk.free()
            rerun(flow, trial, *targets, unlock=True)

    return scenario


def read_only(stage: str) -> Scenario:
    """Results can't be written to, from the start or from a cell on."""

    def scenario(ground: Ground, trial: Trial, dice: random.Random) -> None:
        with _on_small_disk(ground, f"readonly-{stage}", "results") as (flow, disk):
            if stage == "start":
                trial.check(disk.writable(False), "could not be made read-only")
                running = flow.start("cells")
            else:
                running = flow.start("cells")
                wait_for(measuring(flow, running), "a cell")
                # As a disk with errors does it, by force: what is open for writing stays so.
                wait_for(lambda: disk.writable(False) or running.poll() is not None, "read-only", 30.0)
            ended(flow, trial, running)
            nothing_left(flow, trial, "on the read-only disk")
            disk.writable(True)
            rerun(flow, trial, "cells", unlock=True)

    return scenario


# -- time ----------------------------------------------------------------------------------------------------
def clock_jump(seconds: int) -> Scenario:
    """The wall clock of all processes jumps in the middle of a cell."""

    def scenario(ground: Ground, trial: Trial, dice: random.Random) -> None:
        flow = ground.flow(f"clock{seconds:+d}")
        shift = flow.folder / "shift"
        shift.write_text("0", encoding="ascii")
        flow.extra = {"LD_PRELOAD": str(home_of_clock(flow.folder)), "FAULT_CLOCK_FILE": str(shift)}
        running = flow.start("cells")
        wait_for(measuring(flow, running), "a cell")
        time.sleep(dice.uniform(0.0, 0.5))
        shift.write_text(str(seconds), encoding="ascii")
        ended(flow, trial, running, fails=False)
        trial.check(len(digests(flow, trial)) == 2, "cells are missing")
        rerun(flow, trial, "cells")
        flow.extra = {}

    return scenario


def stopped_engine(for_s: float) -> Scenario:
    """An engine gets SIGSTOP in the middle of a cell, and SIGCONT after a while."""

    def scenario(ground: Ground, trial: Trial, dice: random.Random) -> None:
        flow = ground.flow("stopped")
        running = flow.start()
        wait_for(measuring(flow, running), "a cell")
        time.sleep(dice.uniform(0.2, 0.6))
        engine = victim(flow, "engine", running.pid)
        trial.check(engine is not None and engine.signal(signal.SIGSTOP), "there was no engine")
        time.sleep(for_s)
        if engine is not None:
            engine.signal(signal.SIGCONT)
        ended(flow, trial, running, fails=False)
        checks = [json.loads(path.read_text("utf-8")) for path in flow.results.glob("parts/**/checks.json")]
        machine = [each for one in checks for each in one["checks"] if each["name"] == "machine"]
        reasons = [each["reason"] for each in machine if each["verdict"] == "invalid"]
        trial.check(any("was stopped" in reason for reason in reasons), f"the cell is not marked: {machine}")
        trial.sees += [f"in report and tables: check machine: invalid: {reason}" for reason in reasons]
        rerun(flow, trial)

    return scenario
