# SPDX-License-Identifier: Apache-2.0
"""Fault campaign on real engines: kill anything at any moment of a run, then ask what is left and run it again.

    python -m tests.real.fault_campaign --count 20 --seed 1

Every trial runs the workflow (one layout of the demo, one cell with few prompts) in a folder of its own, and sends a
signal to one of {snakemake, the cell's job, supervisor, engine, an engine's child, proxy, client} at a random moment of
bring-up, cell or tear-down. Then:

- the run comes to an end, and no process of it is left, nor a port held;
- every cell that looks complete is;
- the same command finishes what is missing, and leaves nothing either.

About a minute and a half a trial on two cores. Environment and model are taken from the repository's store, or from
SPLITBENCH_STORE. `tests.workflow.fault_campaign` does the same on stubbed engines, 200 times as fast.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from splitbench.files import sha256_file
from splitbench.serving import ports
from splitbench.serving.leftovers import SHARED_MEMORY
from splitbench.serving.processes import command_line
from splitbench.serving.state import read_record, session_record
from tests.fakes.layouts import free_ports
from tests.faults import ground
from tests.workflow.flow import REPOSITORY, Flow

VICTIMS = ("snakemake", "job", "supervisor", "engine", "engine's child", "proxy", "client")
# Seconds within a phase in which the signal comes: starts take 20 to 30 s, a cell about 15, an end 2.
PHASES = {"starting": 25.0, "ready": 15.0, "stopping": 1.5}
RUN_LIMIT_S = 400.0


@dataclass
class Trial:
    """One roll of the dice, and what came of it."""

    number: int
    layout: str
    victim: str
    signal: str
    phase: str
    delay_s: float
    hit: str | None = None
    in_phase: str | None = None
    exit_code: int | None = None
    wrong: list[str] = field(default_factory=list)
    took_s: float = 0.0


def roll(dice: random.Random, number: int) -> Trial:
    """A random trial; phases take turns, so that few trials have all of them."""
    config = demo()
    layout = dice.choice(sorted(config["layouts"]))
    kind = config["layouts"][layout]["kind"]
    victim = dice.choice([each for each in VICTIMS if each != "proxy" or kind == "pd"])
    phase = list(PHASES)[number % len(PHASES)]
    word = dice.choice(("SIGKILL", "SIGKILL", "SIGTERM"))
    return Trial(number, layout, victim, word, phase, dice.uniform(0.0, PHASES[phase]))


def demo() -> dict[str, Any]:
    """The demo's config."""
    return dict(yaml.safe_load((REPOSITORY / "config" / "config.yaml").read_text(encoding="utf-8")))


def config_of(layout: str) -> dict[str, Any]:
    """One cell of one layout of the demo, with few prompts."""
    config = copy.deepcopy(demo())
    config["experiment"] = "faults"
    config["layouts"] = {layout: config["layouts"][layout]}
    config["node"] = {"base_port": free_ports(12)[0]}
    prompts = {"per_concurrency": 1, "minimum": 12}
    config["workloads"] = {"some": {"input_tokens": 256, "output_tokens": 24, "prompts": prompts}}
    config["matrix"] = {"concurrency": [2]}
    config["figures"] = {}
    config.pop("claims", None)
    return config


def strike(trial: Trial, flow: Flow, running: Any) -> None:
    """Wait for the moment, and send the signal."""
    begun = time.monotonic()
    order = [*PHASES, "ended"]
    while running.poll() is None and time.monotonic() - begun < RUN_LIMIT_S:
        now = ground.phase(flow)
        if now in order and order.index(now) >= order.index(trial.phase):
            break
        time.sleep(0.02)
    moment = time.monotonic() + trial.delay_s
    while time.monotonic() < moment and running.poll() is None:
        if trial.phase != "starting" and ground.phase(flow) == "ended":
            break  # the phase was shorter than the dice thought; hit what is still there
        time.sleep(0.02)
    victim = ground.victim(flow, trial.victim, running.pid)
    trial.in_phase = ground.phase(flow)
    if victim is not None and victim.alive() and running.poll() is None:
        trial.hit = command_line(victim.pid)[:80]
        if not victim.signal(getattr(signal, trial.signal)):
            trial.hit = None


def complete(flow: Flow, trial: Trial) -> int:
    """Number of complete cells; what looks complete and is not goes into the trial's record."""
    records = sorted(flow.results.glob("cells/*/*/*/*/record.json"))
    for path in records:
        record = json.loads(path.read_text(encoding="utf-8"))
        if sha256_file(path.with_name("bench.json")) != record["bench_sha256"]:
            trial.wrong.append(f"{path}: another result than the recorded one")
        if record["completed"] != record["prompts"]:
            trial.wrong.append(f"{path}: {record['completed']} of {record['prompts']} prompts")
        for name in ("cell.json", "metrics.json", "engine_facts.json"):
            json.loads(path.with_name(name).read_text(encoding="utf-8"))
    return len(records)


def litter() -> set[str]:
    """Sockets, rendezvous files and shared memory as vLLM makes them, wherever it makes them unless told."""
    names = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|vllm_dist_\w+|psm_[0-9a-f]{8}")
    folders = (Path(tempfile.gettempdir()), SHARED_MEMORY)
    return {str(path) for folder in folders for path in folder.iterdir() if names.fullmatch(path.name)}


def leaves_nothing(flow: Flow, trial: Trial, when: str, before: set[str]) -> None:
    """No process of the run, no port of its session, and no file beside its results.

    After a supervisor was killed files stay until the next start; so they are asked for after that.
    """
    left = flow.gone(60)
    if left:
        trial.wrong.append(f"{when}: processes left: {[command_line(pid)[:120] for pid in left]}")
    record = read_record(session_record(flow.state))
    if record and (held := ports.busy(record["ports"])):
        trial.wrong.append(f"{when}: ports held: {[(port, ports.holder(port)) for port in held]}")
    if when == "after the rerun" and (files := litter() - before):
        trial.wrong.append(f"{when}: files left: {sorted(files)}")
    if when == "after the rerun":
        asked = flow.results.glob("logs/sessions/*/*/request.json")
        runtimes = [Path(json.loads(path.read_text(encoding="utf-8"))["runtime"]) for path in asked]
        if there := [str(path) for path in runtimes if path.exists()]:
            trial.wrong.append(f"{when}: folders for sockets left: {there}")


def run_trial(trial: Trial, folder: Path, store: Path) -> Trial:
    """Run, hit, look, run again."""
    begun, before = time.monotonic(), litter()
    flow = Flow(folder, Path("unused"), config=config_of(trial.layout), store=store)
    running = flow.start("cells")
    try:
        strike(trial, flow, running)
        trial.exit_code = running.wait(timeout=RUN_LIMIT_S)
    except Exception as error:
        trial.wrong.append(f"the run did not come to an end: {error}")
        running.kill()
        running.wait()
    leaves_nothing(flow, trial, "after the fault", before)
    complete(flow, trial)
    if trial.victim == "snakemake":  # it may not have got to taking its own lock away
        flow.run("--unlock")
    again = flow.run("cells", limit_s=RUN_LIMIT_S)
    if again.returncode != 0:
        trial.wrong.append(f"the rerun failed: {(again.stdout + again.stderr)[-3000:]}")
    leaves_nothing(flow, trial, "after the rerun", before)
    if (count := complete(flow, trial)) != 1:
        trial.wrong.append(f"the rerun finished with {count} cells")
    trial.took_s = round(time.monotonic() - begun, 1)
    return trial


def campaign(count: int, seed: int, store: Path, say: Callable[[str], None], first: int = 0) -> list[Trial]:
    """Run `count` trials from number `first` on; folders of sound ones are deleted."""
    base = Path(tempfile.mkdtemp(prefix="sbr-")).resolve()
    trials = []
    for number in range(first, first + count):
        trial = roll(random.Random(f"{seed}/{number}"), number)
        run_trial(trial, base / f"{number}", store)
        trials.append(trial)
        hit = f"in {trial.in_phase}" if trial.hit else "(none there)"
        say(
            f"{number:3d} {'WRONG' if trial.wrong else 'ok   '} {trial.layout:10s} {trial.signal} {trial.victim} "
            f"{hit}, exit {trial.exit_code}, {trial.took_s:.0f} s"
        )
        if trial.wrong:
            say(f"    {json.dumps(asdict(trial), indent=1)}\n    kept: {base / str(number)}")
        else:
            shutil.rmtree(base / f"{number}")
    if not any(trial.wrong for trial in trials):
        base.rmdir()
    return trials


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    options = parser.parse_args()
    store = Path(os.environ.get("SPLITBENCH_STORE", REPOSITORY / ".splitbench")).resolve()
    trials = campaign(options.count, options.seed, store, lambda text: print(text, flush=True), options.first)
    hits = Counter(f"{trial.in_phase} {trial.victim} {trial.signal}" for trial in trials if trial.hit)
    for name, number in sorted(hits.items()):
        print(f"  {number:3d} x {name}")
    wrong = sum(bool(trial.wrong) for trial in trials)
    print(f"{len(trials)} trials, {sum(hits.values())} signals delivered, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
