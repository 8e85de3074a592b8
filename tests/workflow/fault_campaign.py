# SPDX-License-Identifier: Apache-2.0
"""Fault campaign: kill anything of a session at any moment, and see that nothing leaks and nothing lies.

    python -m tests.workflow.fault_campaign --count 200 --seed 1

Every trial starts a layout of stubbed engines (that fork, detach, ignore SIGTERM, die, hang, fill their log,
as the dice fall) for a cell in a process of its own, sends SIGKILL or SIGTERM to one or two of {supervisor,
engine, engine's child, proxy, client, owner, cell} at a random moment of bring-up, hold or tear-down, and
then asks:

- does the cell come to an end, and has it left a result only if its session was sound until it was complete?
- does the next acquire give a working session, whatever the fault left?
- does the stop after it leave 0 processes with our mark, 0 held ports, and a free node?
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from splitbench.errors import UserError
from splitbench.files import read_json, write_json
from splitbench.serving import ports
from splitbench.serving.leftovers import SHARED_MEMORY, segments
from splitbench.serving.plan import Plan
from splitbench.serving.processes import (
    ProcessId,
    all_processes,
    command_line,
    descendants,
    marked,
    read_stat,
)
from splitbench.serving.session import Owner, acquire, node_lock, status, stop
from splitbench.serving.state import read_record, session_record
from tests.fakes.layouts import aggregated, disaggregated, free_ports, request, warm_client

# "cell" is the process that waits for the session: in tear-down the one that stops it.
VICTIMS = ("supervisor", "engine", "engine's child", "proxy", "client", "owner", "cell")
PHASES = ("bring-up", "hold", "tear-down")
CELL_LIMIT_S = 90.0


@dataclass
class Fault:
    """Who is hit, how, and when (seconds after the phase began)."""

    victim: str
    signal: str
    phase: str
    delay_s: float
    hit: int | None = None
    at: float | None = None  # time.monotonic(), the same clock in every process


@dataclass
class Trial:
    """One roll of the dice, and what came of it."""

    number: int
    layout: str
    ports: list[int]
    behaviour: dict[str, str]
    grace_s: float
    hold_s: float
    client: bool
    faults: list[Fault]
    cell_exit: int | None = None
    result: bool = False
    wrong: list[str] = field(default_factory=list)

    def plan(self) -> Plan:
        """The layout of this trial."""
        if self.layout == "agg":
            return aggregated(self.ports[0], grace_s=self.grace_s, **self.behaviour)
        return disaggregated(self.ports, grace_s=self.grace_s, prefill=self.behaviour, decode=self.behaviour)


def roll(dice: random.Random, number: int, numbers: list[int]) -> Trial:
    """A random trial."""
    behaviour = {"startup_s": f"{dice.uniform(0.0, 0.4):.2f}"}
    behaviour["children"] = str(dice.choice((0, 0, 1, 3)))
    behaviour["core"] = dice.choice(("0", "1"))
    behaviour["ignore_term"] = dice.choice(("0", "0", "1"))
    behaviour["litter"] = "1"
    spoiled = dice.random()
    if spoiled < 0.05:
        behaviour["die_early"] = "RuntimeError: Engine core initialization failed."
    elif spoiled < 0.10:
        behaviour["hang_start"] = "1"
    elif spoiled < 0.15:
        behaviour["log_forever"] = "1"
    elif spoiled < 0.20:
        behaviour["die_after_requests"] = "1"
    layout, client = dice.choice(("agg", "pd")), dice.random() < 0.5
    there = [
        victim
        for victim in VICTIMS
        if (victim != "proxy" or layout == "pd")
        and (victim != "client" or client)
        and (victim != "engine's child" or behaviour["core"] == "1" or behaviour["children"] != "0")
    ]
    faults = []
    for _ in range(dice.choice((1, 1, 2))):
        phase = dice.choice(PHASES)
        limit_s = {"bring-up": 0.6, "hold": 0.4, "tear-down": 0.1}[phase]
        word = dice.choice(("SIGKILL", "SIGKILL", "SIGTERM"))
        faults.append(Fault(dice.choice(there), word, phase, dice.uniform(0.0, limit_s)))
    return Trial(
        number=number,
        layout=layout,
        ports=numbers,
        behaviour=behaviour,
        grace_s=dice.choice((0.3, 1.0)),
        hold_s=dice.uniform(0.2, 0.6),
        client=client,
        faults=faults,
    )


# -- the cell ------------------------------------------------------------------------------------------------
def cell(trial: Trial, state: Path, folder: Path, owner: Owner) -> int:
    """What a cell does: lock, acquire, measure with an eye on the session, write a result if all was well."""
    wanted = request(trial.plan(), folder, owner=owner, client=warm_client() if trial.client else None)

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    with node_lock(state, f"trial {trial.number}", say):
        try:
            with acquire(wanted, say, state=state) as session:
                (folder / "holding").touch()
                end = time.monotonic() + trial.hold_s
                while time.monotonic() < end:
                    if (why := session.lost()) is not None:
                        say(f"lost: {why}")
                        return 1
                    time.sleep(0.02)
                asked = time.monotonic()
                if (why := session.confirm()) is not None:
                    say(f"lost at the end: {why}")
                    return 1
                write_json(folder / "result.json", {"asked": asked, "session": session.id})
        except UserError as error:
            say(str(error))
            return 1
    return 0


# -- the faults ----------------------------------------------------------------------------------------------
def find(fault: Fault, state: Path, cell_process: ProcessId, owner: ProcessId) -> ProcessId | None:
    """The process to be hit now, if there is one."""
    if fault.victim == "cell":
        return cell_process
    if fault.victim == "owner":
        return owner
    record = read_record(session_record(state))
    if record is None or record["phase"] == "ended":
        return None
    supervisor = ProcessId.parse(record["supervisor"])
    if fault.victim == "supervisor":
        return supervisor
    table = all_processes()
    started = {each["kind"]: ProcessId.parse(each["process"]) for each in record["processes"]}
    if fault.victim == "engine's child":
        mains = {ProcessId.parse(each["process"]).pid for each in record["processes"]}
        below = [
            stat for stat in descendants(supervisor.pid, table) if stat.pid not in mains and not stat.dead
        ]
        return ProcessId(below[0].pid, below[0].started) if below else None
    return started.get(fault.victim)


def strike(fault: Fault, state: Path, cell_process: ProcessId, owner: ProcessId) -> None:
    """Send the signal."""
    victim = find(fault, state, cell_process, owner)
    if victim is not None and victim.signal(getattr(signal, fault.signal)):
        fault.hit, fault.at = victim.pid, time.monotonic()


def forked(log: Path, work: Callable[[], int]) -> multiprocessing.process.BaseProcess:
    """Do some work in a process of its own, its output in a log. Forked, since hundreds are started."""

    def target() -> None:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.exit(work())

    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    return process


def identity(pid: int | None) -> ProcessId:
    """Of a child that was just started."""
    assert pid is not None
    stat = read_stat(pid)
    assert stat is not None
    return ProcessId(stat.pid, stat.started)


def run_trial(trial: Trial, state: Path, folder: Path) -> Trial:
    """Bring up, hit, and look at what is left."""
    folder.mkdir(parents=True)
    before = segments()
    write_json(folder / "trial.json", asdict(trial))
    owner = subprocess.Popen(["sleep", "3600"])
    owner_id = identity(owner.pid)
    owner_known = Owner(owner_id.pid, owner_id.started)
    process = forked(folder / "cell.log", lambda: cell(trial, state, folder, owner_known))
    waits = identity(process.pid)  # who waits for the session: the cell, later the one that stops it
    stopper: multiprocessing.process.BaseProcess | None = None
    try:
        begun = time.monotonic()
        for phase in PHASES:
            faults = sorted((f for f in trial.faults if f.phase == phase), key=lambda fault: fault.delay_s)
            if phase == "bring-up":
                for fault in faults:  # the moment counts from when there is somebody to be hit
                    while (
                        find(fault, state, waits, owner_id) is None
                        and process.exitcode is None
                        and not (folder / "holding").exists()
                    ):
                        time.sleep(0.002)
            elif phase == "hold":
                while not (folder / "holding").exists() and process.exitcode is None:
                    if time.monotonic() - begun > CELL_LIMIT_S:
                        trial.wrong.append("the cell neither got its session nor failed")
                        process.kill()
                    time.sleep(0.005)
            else:
                wait_for(process, trial)
                stopper = forked(folder / "stop.log", lambda: stop(state) * 0)
                waits = identity(stopper.pid)
                record = read_record(session_record(state))
                while record and record["phase"] == "ready" and stopper.exitcode is None:
                    time.sleep(0.002)
                    record = read_record(session_record(state))
            now = time.monotonic()
            for fault in faults:
                time.sleep(max(0.0, now + fault.delay_s - time.monotonic()))
                strike(fault, state, waits, owner_id)
        assert stopper is not None
        wait_for(stopper, trial)
        trial.cell_exit = process.exitcode
        judge(trial, state, folder, before)
    finally:
        owner.kill()
        owner.wait()
        for each in (process, stopper):
            if each is not None:
                each.kill()
                each.join()
    return trial


def wait_for(process: multiprocessing.process.BaseProcess, trial: Trial) -> None:
    """A process of the workflow must come to an end by itself."""
    process.join(CELL_LIMIT_S)
    if process.exitcode is None:
        trial.wrong.append("the cell or the stop did not come to an end")
        process.kill()
        process.join()


def judge(trial: Trial, state: Path, folder: Path, before: dict[str, int]) -> None:
    """Everything that must hold after any fault."""
    result = folder / "result.json"
    trial.result = result.exists()
    if trial.result:
        asked = read_json(result)["asked"]
        for fault in trial.faults:
            essential = fault.victim in ("supervisor", "engine", "proxy") and fault.signal == "SIGKILL"
            if essential and fault.at is not None and fault.at < asked:
                trial.wrong.append(f"a result, though the {fault.victim} was killed before its end")
    if trial.result != (trial.cell_exit == 0):
        killed = any(fault.victim == "cell" and fault.at is not None for fault in trial.faults)
        if not (killed and trial.result):  # killed between its result and its exit: the result stands
            trial.wrong.append(f"exit code {trial.cell_exit}, result {trial.result}")
    sound = {"startup_s": trial.behaviour["startup_s"], "litter": "1", "core": "1", "children": "1"}
    again = Trial(**{**asdict(trial), "behaviour": sound, "faults": []})
    try:
        with node_lock(state, "the next cell", lambda text: None):
            with acquire(request(again.plan(), folder), lambda text: None, state=state) as session:
                if (why := session.confirm()) is not None:
                    trial.wrong.append(f"the next session is lost: {why}")
            mine = {process.pid for process in marked(str(state), session.id)}
            strangers = [process for process in marked(str(state)) if process.pid not in mine]
            if strangers:
                trial.wrong.append(
                    f"left over beside the next session: {[command_line(p.pid) for p in strangers]}"
                )
    except UserError as error:
        trial.wrong.append(f"the next session did not start: {str(error)[:2000]}")
    stop(state)
    left = marked(str(state))
    if left:
        trial.wrong.append(
            f"{len(left)} processes left after the stop: {[command_line(p.pid) for p in left]}"
        )
    held = ports.busy(trial.ports)
    if held:
        trial.wrong.append(f"held ports: {[(port, ports.holder(port)) for port in held]}")
    if status(state)["supervisor"]:
        trial.wrong.append("a supervisor after the stop")
    if runtimes := list(state.glob("run-*")):
        trial.wrong.append(f"folders for sockets left: {[str(path.resolve()) for path in runtimes]}")
    # Who kills the supervisor in the very moment in which shared memory is made leaves what nobody has recorded.
    unseen = any(f.victim == "supervisor" and f.phase == "bring-up" and f.hit for f in trial.faults)
    shared = [name for name in segments() if name.startswith("psm_stub_") and name not in before]
    if shared and not unseen:
        trial.wrong.append(f"shared memory left: {shared}")
    for name in shared:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    sockets = [path.name for path in state.glob("*.sock")]
    if sockets:
        trial.wrong.append(f"sockets left: {sockets}")


def campaign(count: int, seed: int, say: Any, first: int = 0) -> list[Trial]:
    """Run `count` trials from number `first` on one state folder: each has to cope with what the one before left."""
    base = Path(tempfile.mkdtemp(prefix="sb-")).resolve()
    state = base / "s"
    state.mkdir(mode=0o700)
    numbers = free_ports(5)
    trials = []
    try:
        for number in range(first, first + count):
            trial = roll(random.Random(f"{seed}/{number}"), number, numbers)
            run_trial(trial, state, base / f"{number}")
            trials.append(trial)
            hits = ", ".join(
                f"{f.signal} {f.victim} in {f.phase}{'' if f.hit else ' (none there)'}" for f in trial.faults
            )
            say(f"{number:4d} {'WRONG' if trial.wrong else 'ok   '} {trial.layout:3s} {hits}")
            for text in trial.wrong:
                say(f"       {text}")
            if trial.wrong:
                say(f"       {json.dumps(asdict(trial))}\n       kept: {base / str(number)}")
            else:
                shutil.rmtree(base / f"{number}")
    finally:
        stop(state)
        if not any(trial.wrong for trial in trials):
            shutil.rmtree(base)
    return trials


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    options = parser.parse_args()
    begun = time.monotonic()
    trials = campaign(options.count, options.seed, lambda text: print(text, flush=True), options.first)
    hits = Counter(
        f"{fault.phase:9s} {fault.victim:14s} {fault.signal}"
        for trial in trials
        for fault in trial.faults
        if fault.hit
    )
    for name, number in sorted(hits.items()):
        print(f"  {number:4d} x {name}")
    wrong = sum(bool(trial.wrong) for trial in trials)
    results = sum(trial.result for trial in trials)
    print(
        f"{len(trials)} trials, {sum(hits.values())} signals delivered, {results} results, {wrong} wrong, "
        f"{time.monotonic() - begun:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
