# SPDX-License-Identifier: Apache-2.0
"""Starting a child that can't outlive its supervisor unnoticed, in an environment that the plan decides."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from splitbench.serving.processes import ProcessId

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Variables that would steer an engine from the shell that happened to start it. What an engine does must
# follow from its plan: they belong into the layout's `env`. Snakemake sets the numbers of threads to those
# of the job that comes first, which would throttle an engine on CPU to one core.
_STEERING = ("VLLM_", "LMCACHE_", "UCX_", "NIXL_", "OMP_", "KMP_", "GOMP_", "SNAKEMAKE_", "SPLITBENCH_")
_STEERING_NAMES = frozenset(
    {
        "GOTO_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSTARTUP",
        "PYTHONHASHSEED",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
    }
)
# Where things are kept, and privacy: the user's affair, without effect on speed.
_KEPT = frozenset({"VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK"})


def child_environment(
    inherited: Mapping[str, str], planned: Mapping[str, str], argv: Sequence[str], marks: Mapping[str, str]
) -> dict[str, str]:
    """A child's environment: what was inherited, less what steers engines, then the plan's, then our marks.

    The folder of the child's interpreter comes first in PATH, so that compilers and tools of its own
    environment are found as if that had been activated.
    """
    kept = {
        name: value
        for name, value in inherited.items()
        if name in _KEPT or not (name.startswith(_STEERING) or name in _STEERING_NAMES)
    }
    # A program that sets its title (vLLM does) writes over its environment unless told not to; the marks
    # must stay readable in /proc/PID/environ.
    result = {**kept, "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1", **planned, **marks}
    folder = os.path.dirname(argv[0])  # noqa: PTH120 - a bare name has no folder, where Path would say "."
    if folder and "PATH" not in planned:
        result["PATH"] = os.pathsep.join(part for part in (folder, kept.get("PATH", os.defpath)) if part)
    return result


def dropped(inherited: Mapping[str, str]) -> list[str]:
    """Engine settings in the caller's environment that engines will not see, for a word to the user."""
    engines = ("VLLM_", "LMCACHE_", "UCX_", "NIXL_")
    return sorted(name for name in inherited if name.startswith(engines) and name not in _KEPT)


def become_subreaper() -> None:
    """Have orphaned descendants handed to this process instead of to init, so that none can slip away."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


@dataclass
class Child:
    """A process that the supervisor started; `status` is its wait status once it has ended."""

    name: str
    kind: str  # service, engine, proxy or client
    process: ProcessId
    log: Path
    started_s: float
    popen: subprocess.Popen[bytes] = field(repr=False)
    status: int | None = None

    @property
    def title(self) -> str:
        """Its name for people."""
        return self.name if self.name == self.kind else f"{self.kind} {self.name}"

    @property
    def pid(self) -> int:
        """Its process id, also that of its group and its OS session."""
        return self.process.pid


def spawn(
    name: str,
    kind: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    folder: Path,
    started_s: float,
    cores: Sequence[int] = (),
) -> Child:
    """Start a child in its own OS session and process group, its output in `<folder>/<name>.log`.

    When the supervisor dies, the kernel sends the child SIGTERM. To be called from the supervisor's main
    thread: it is the death of the calling thread that counts.

    Args:
        cores: the only CPU cores it may run on, with all its threads and children; none: any.

    Raises:
        OSError: the program can't be executed.
    """
    parent = os.getpid()

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # died in between: nobody would send the signal
            os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)
        signal.set_wakeup_fd(-1)
        # Ignored signals survive exec; a shell's background job ignores SIGINT, nohup's SIGHUP.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    log = folder / f"{name}.log"
    with log.open("ab") as output:
        popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=dict(env),
            start_new_session=True,
            close_fds=True,
            preexec_fn=prepare,
        )
    process = ProcessId.of(popen.pid)
    if process is None:  # it has ended already; a zombie keeps its pid until it is collected
        process = ProcessId(popen.pid, -1)
    return Child(name, kind, process, log, started_s, popen)


def reap(children: Mapping[int, Child]) -> list[Child]:
    """Collect every child that has ended, adopted ones included; return those that were started here."""
    ended: list[Child] = []
    while True:
        pid, status = 0, 0
        with suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return ended
        child = children.get(pid)
        if child is not None and child.status is None:
            child.status = status
            child.popen.returncode = os.waitstatus_to_exitcode(status)
            ended.append(child)
