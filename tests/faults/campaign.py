# SPDX-License-Identifier: Apache-2.0
"""Faults of all kinds against the whole workflow on stubbed engines: what a user sees, what is lost, what a rerun does.

    python -m tests.faults.campaign --seed 1                     all of it, about a quarter of an hour
    python -m tests.faults.campaign --only "disk" --seed 7       those whose name holds a word
    python -m tests.faults.campaign --record kept.json --write docs/faults.md

Every fault hits a run in a folder of its own. Afterwards the same command is run again: it must finish, measure only
what is missing, keep every complete cell to the byte, and leave no process, port, socket or half-written file. What a
user sees must be lines of ours, never a traceback. Moments come from the seed; they move a little with the machine's
speed. `tests.workflow.fault_campaign` kills at random moments of a session, 200 times; `tests.real.fault_campaign` does
so on real engines.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults import machine, others
from tests.faults.ground import Ground, SkippedError, Trial

Scenario = Callable[[Ground, Trial, random.Random], None]

STOPPED_S = 30.0
FAULTS: dict[str, Scenario] = {
    **{
        f"kill -9 of {'an ' if name[0] == 'e' else 'the '}{name}, in bring-up, cell and tear-down": machine.kill(
            name
        )
        for name in machine.VICTIMS
    },
    "kill -9 of the job that makes tables, statistics, a figure, the report": machine.kill_later_job,
    "lost power in a cell; the reboot clears /tmp": machine.power_loss,
    "disk of the results full from the start": machine.disk_full("results", "start"),
    "disk of the results full from bring-up on": machine.disk_full("results", "bring-up"),
    "disk of the results full from a cell on": machine.disk_full("results", "cell"),
    "disk of the results full before the tables": machine.disk_full("results", "tables"),
    "disk of the state folder full from the start": machine.disk_full("state", "start"),
    "disk of the state folder full from a cell on": machine.disk_full("state", "cell"),
    "disk of everything full from a cell on": machine.disk_full("", "cell"),
    "results read-only from the start": machine.read_only("start"),
    "wall clock jumps an hour ahead in a cell": machine.clock_jump(3600),
    "wall clock jumps an hour back in a cell": machine.clock_jump(-3600),
    "an engine is stopped (SIGSTOP) for 30 s in a cell": machine.stopped_engine(STOPPED_S),
    "a port is stolen between plan and start": others.stolen_port,
    "two workflows at once; a third in the same folder": others.two_workflows,
    "150 rude clients at the proxy: half a request, deaf, gone": others.rude_clients,
    "an engine dies after 10,000 lines of log, one of 1 MiB": others.long_log_at_the_end,
    "an engine never stops writing log": others.long_log_beside,
    "the cell's folder is deleted while it is measured": others.deleted("cell", "deleted"),
    "the cell's folder is renamed while it is measured": others.deleted("cell", "renamed"),
    "the sessions' logs are deleted while a cell is measured": others.deleted("logs", "deleted"),
    "all results are deleted while a cell is measured": others.deleted("results", "deleted"),
    "the state folder is deleted while a cell is measured": others.deleted("state", "deleted"),
}


def campaign(
    names: list[str], seed: int, say: Callable[[str], None], faults: Mapping[str, Scenario]
) -> list[Trial]:
    """Try the named faults; folders of those that came out right are deleted."""
    base = Path(tempfile.mkdtemp(prefix="sbf-")).resolve()
    ground = Ground(base)
    trials = []
    for name in names:
        trial, begun = Trial(name, f"{seed}/{name}"), time.monotonic()
        try:
            faults[name](ground, trial, random.Random(trial.seed))
        except SkippedError as reason:
            say(f"skipped {name}: {reason}")
            continue
        except Exception as error:
            trial.wrong.append(f"{type(error).__name__}: {str(error)[-2000:]}")
        trial.took_s = round(time.monotonic() - begun, 1)
        trials.append(trial)
        say(f"{'WRONG' if trial.wrong else 'ok   '} {trial.took_s:5.0f} s  {name}")
        for line in trial.wrong:
            say(f"        {line}")
    if not any(trial.wrong for trial in trials):
        shutil.rmtree(base, ignore_errors=True)
    else:
        say(f"kept: {base}")
    return trials


# -- the page ------------------------------------------------------------------------------------------------
def page(records: list[dict[str, Any]]) -> str:
    """The table for the guide."""
    lines = [
        "| fault | what the user sees | complete cells lost | the same command again |",
        "|---|---|---|---|",
    ]
    for record in records:
        seen = "<br>".join(_cell(text) for text in record["sees"][:3]) or "nothing: the run finishes"
        lost = "none" if not record["wrong"] else "see below"
        lines.append(f"| {record['fault']} | {seen} | {lost} | {_cell(record['rerun'])} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 240 else text[:237] + "..."


START, END = "<!-- made by tests.faults.campaign -->", "<!-- end -->"


def write_page(path: Path, records: list[dict[str, Any]]) -> None:
    """Put the table between the marks of the page."""
    text = path.read_text(encoding="utf-8")
    head, _, rest = text.partition(START)
    _, _, tail = rest.partition(END)
    path.write_text(f"{head}{START}\n{page(records)}{END}{tail}", encoding="utf-8")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="faults whose name holds one of these words, after commas")
    parser.add_argument("--record", type=Path, help="JSON file that results are added to, by fault")
    parser.add_argument("--write", type=Path, help="page whose table is made from the record")
    options = parser.parse_args()
    names = [name for name in FAULTS if any(word in name for word in options.only.split(","))]
    trials = campaign(names, options.seed, lambda text: print(text, flush=True), FAULTS)
    kept = {trial.fault: asdict(trial) for trial in trials}
    if options.record is not None:
        if options.record.exists():
            kept = json.loads(options.record.read_text(encoding="utf-8")) | kept
        options.record.write_text(json.dumps(kept, indent=1, ensure_ascii=False), encoding="utf-8")
    if options.write is not None:
        write_page(options.write, [kept[name] for name in FAULTS if name in kept])
    wrong = sum(bool(trial.wrong) for trial in trials)
    print(f"{len(trials)} faults, {wrong} wrong, {sum(trial.took_s for trial in trials):.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
