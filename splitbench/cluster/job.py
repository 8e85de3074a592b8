# SPDX-License-Identifier: Apache-2.0
"""What runs in an allocation in place of a shell: snakemake, ended as SLURM wants and continued where it stopped.

    python -m splitbench.cluster.job --results results/NAME -- COMMAND...

=====================  ==================================================================================
USR1, before the       snakemake is sent TERM: the cell that is measured is finished and kept, the session
time limit             ends, and the job is requeued where cells are left and some were measured
TERM, INT: scancel,    snakemake and its jobs are interrupted as by Ctrl-C: the session ends now, the cell
preemption             that was measured is lost
another start of it    when SLURM took this node for lost and started the job elsewhere, this one ends
=====================  ==================================================================================

A start after one that was killed removes the lock that snakemake's killed predecessor left, when SLURM says that it
has ended.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitbench.cluster.node import PLACE_VARIABLE
from splitbench.files import write_json
from splitbench.serving.state import OWNER_VARIABLE, read_record
from splitbench.workflow import say

MARKER = Path(".snakemake", "splitbench-slurm.json")
LOCKS = Path(".snakemake", "locks")
EVERY_S = 1.0
# A predecessor on another node sees within this time that it has been replaced, and ends its engines.
FENCE_S = 20.0
_LIVING = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "CONFIGURING", "SIGNALING", "STAGE_OUT"}
)


class Job:
    """One start of a job.

    Args:
        command: snakemake and its arguments.
        results: folder of the experiment's results.
        environ: the environment of the job.
    """

    def __init__(self, command: Sequence[str], results: Path, environ: dict[str, str]) -> None:
        self.command = list(command)
        self.results = results
        self.environ = {
            name: value for name, value in environ.items() if name not in (OWNER_VARIABLE, PLACE_VARIABLE)
        }
        self.job = environ["SLURM_JOB_ID"]
        self.me = {
            "job": self.job,
            "start": int(environ.get("SLURM_RESTART_COUNT", "0")),
            "node": environ.get("SLURMD_NODENAME", ""),
        }
        self.child: subprocess.Popen[bytes] | None = None
        self.limit_is_near = False
        self.interrupted = False

    def run(self) -> int:
        """Run snakemake to its end; its exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._interrupt)
        signal.signal(signal.SIGUSR1, self._finish)
        self._make_way()
        write_json(MARKER, self.me)
        measured = self._measured()
        code = 130 if self.interrupted else self._snakemake()
        if read_record(MARKER) == self.me:
            MARKER.unlink(missing_ok=True)
        if self.limit_is_near and code != 0 and not self.interrupted:
            self._again(self._measured() - measured)
        return code

    def _snakemake(self) -> int:
        self.child = subprocess.Popen(
            self.command,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        if self.interrupted or self.limit_is_near:  # told in between
            self._signal_child()
        while True:
            try:
                return self.child.wait(EVERY_S)
            except subprocess.TimeoutExpired:
                pass
            if not self.interrupted and read_record(MARKER) not in (self.me, None):
                say("SLURM has started this job elsewhere: ending here")
                self._interrupt()

    # -- signals ---------------------------------------------------------------------------------------------------
    def _interrupt(self, *_: Any) -> None:
        self.interrupted = True
        self._signal_child()

    def _finish(self, *_: Any) -> None:
        self.limit_is_near = True
        say("the time limit is near: finishing the cell that is measured")
        self._signal_child()

    def _signal_child(self) -> None:
        if self.child is None or self.child.poll() is not None:
            return
        if self.interrupted:
            os.killpg(self.child.pid, signal.SIGINT)  # as a terminal does: jobs too
        else:
            self.child.send_signal(signal.SIGTERM)

    # -- before and after ------------------------------------------------------------------------------------------
    def _make_way(self) -> None:
        """Remove what a killed predecessor left, if SLURM knows that it has ended."""
        before = read_record(MARKER)
        if before is None:
            return
        if before["job"] == self.job:
            if before["node"] != self.me["node"]:
                write_json(MARKER, self.me)
                say(f"this job ran on {before['node']} before; giving that {FENCE_S:g} s to end")
                deadline = time.monotonic() + FENCE_S
                while _locked() and time.monotonic() < deadline and not self.interrupted:
                    time.sleep(0.2)
        elif state_of(before["job"]) in _LIVING:
            return  # snakemake's lock then says that somebody works here
        if _locked():
            say(f"removing the lock that job {before['job']} left")
            subprocess.run([*self.command, "--unlock"], env=self.environ, check=False)

    def _measured(self) -> int:
        return sum(1 for _ in self.results.glob("cells/*/*/*/*/record.json"))

    def _again(self, measured: int) -> None:
        if not measured:
            say("no cell was finished before the time limit: not requeued; ask for more time")
            return
        done = subprocess.run(["scontrol", "requeue", self.job], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            say("requeued, to go on where it stopped")
        else:
            say(f"can't be requeued ({done.stderr.strip()}): submit it again, to go on where it stopped")


def _locked() -> bool:
    return LOCKS.is_dir() and any(LOCKS.iterdir())


def state_of(job: str) -> str | None:
    """What SLURM says of a job; None when it does not know it (any more)."""
    shown = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%T"], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip() or None if shown.returncode == 0 else None


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command as a job of SLURM."""
    parser = argparse.ArgumentParser(prog="python -m splitbench.cluster.job", description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args(argv)
    say(f"job {os.environ['SLURM_JOB_ID']} on {os.environ.get('SLURMD_NODENAME', 'an unnamed node')}")
    return Job(arguments.command, arguments.results, dict(os.environ)).run()


if __name__ == "__main__":
    sys.exit(main())
