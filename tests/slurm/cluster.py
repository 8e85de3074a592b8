# SPDX-License-Identifier: Apache-2.0
"""A whole SLURM on one machine, seen by nobody else: a head and two nodes, each in namespaces of its own.

Real slurmctld, slurmd and munged. Head and nodes have their own pids, host name, network and state folder, and share
the disk, as machines of a cluster do. Nothing outside is touched: `/etc/slurm` is another folder only in there, the
network is a bridge that exists only in there. When the holder of the head's namespaces ends, all of it ends.

Needs root (or what a container calls so) for namespaces, and Debian's packages; `why_not()` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
NODES = ("node0", "node1")
GPUS = 4
_ADDRESS = {"head": "10.77.0.1", "node0": "10.77.0.10", "node1": "10.77.0.11"}
_NAMESPACES = ("--mount", "--uts", "--net", "--pid")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The first process of a pid namespace has to collect orphans, or they stay as zombies.
_INIT = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
while signal.sigwait({signal.SIGCHLD}):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


def why_not() -> str | None:
    """What keeps SLURM from being run here; None when nothing does."""
    missing = {package for name, package in PROGRAMS.items() if shutil.which(name, path=_PATH) is None}
    if missing:
        return f"SLURM is not installed (make slurm, or the Debian packages {', '.join(sorted(missing))})"
    if os.geteuid() != 0:
        return "a private SLURM needs root for its namespaces"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True, check=False
    )
    if tried.returncode != 0:
        return f"namespaces can't be made here: {tried.stderr.decode().strip()}"
    return None


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


class Machine:
    """One "machine": namespaces that a process holds open.

    Args:
        name: its host name.
        inside: the machine whose namespaces these are made in; None: the real one.
    """

    def __init__(self, name: str, inside: Machine | None = None) -> None:
        self.name = name
        command = [
            *("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
            *(sys.executable, "-c", _INIT),
        ]
        if inside is not None:
            command = [*inside.prefix, *command]
        self.holder = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=_die_with_parent)
        self.pid = self._init_pid()
        self.run(["hostname", name])
        self.run(["ip", "link", "set", "lo", "up"])

    def _init_pid(self) -> int:
        """The namespaces' first process, as the real machine counts."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for pid in _below(self.holder.pid):
                try:
                    seen = [
                        line
                        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                        if "NSpid" in line
                    ]
                    program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1]
                except (OSError, IndexError):
                    continue
                if program == b"-c" and seen[0].split()[-1] == "1":
                    return pid
            assert self.holder.poll() is None, f"{self.name}: its namespaces can't be made"
            time.sleep(0.01)
        raise AssertionError(f"{self.name}: its namespaces do not come up")

    @property
    def prefix(self) -> list[str]:
        """What a command is put behind to run on this machine."""
        return self._prefix(Path(os.sep))

    def _prefix(self, folder: Path) -> list[str]:
        # Not nsenter's --wd: it opens the folder before it enters, as a place in another tree of mounts.
        return ["nsenter", *_NAMESPACES, "--target", str(self.pid), "--", "env", f"--chdir={folder}"]

    def run(
        self,
        command: Sequence[str],
        *,
        folder: Path = Path(os.sep),
        env: Mapping[str, str] | None = None,
        check: bool = True,
        limit_s: float = 240,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this machine to its end."""
        try:
            done = subprocess.run(
                [*self._prefix(folder), *command],
                env=_environment(env),
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            told = b"".join(each for each in (late.stdout, late.stderr) if each)
            raise AssertionError(f"{self.name}: {command}: {told.decode()[-4000:]}") from late
        assert done.returncode == 0 or not check, f"{self.name}: {command}: {done.stdout}{done.stderr}"
        return done

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a daemon on this machine, which is not to fork."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [*self.prefix, *command],
                env=_environment(None),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_die_with_parent,
            )

    def work(self) -> dict[int, str]:
        """What runs on this machine besides SLURM's own daemons: pids of the real machine, and command lines."""
        found = {}
        for pid in self.processes():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if Path(os.fsdecode(words[0])).name.rstrip(":") not in ("slurmd", "slurmstepd", "nsenter"):
                found[pid] = b" ".join(words).decode(errors="replace")
        return found

    def processes(self) -> list[int]:
        """Everything that lives on this machine, by pids of the real one, without its first process."""
        mine = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.pid:
                try:
                    if (entry / "ns" / "pid").readlink() == mine and (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def end(self) -> None:
        """End the machine and everything on it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.holder.wait(20)


def _below(pid: int) -> list[int]:
    """Descendants of a process."""
    found = []
    ahead = [pid]
    while ahead:
        try:
            children = Path(f"/proc/{ahead[0]}/task/{ahead[0]}/children").read_text().split()
        except OSError:
            children = []
        ahead = ahead[1:] + [int(child) for child in children]
        found += [int(child) for child in children]
    return found


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPLITBENCH_", "SLURM_", "SBATCH_", "PYTEST_"))
    }
    return kept | {"PATH": _PATH} | dict(extra or {})


class Cluster:
    """A head and two nodes with four pretended GPUs each; `stop` ends all."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sb-slurm-"))
        self.etc = self.folder / "etc"
        self.nodes: dict[str, Machine] = {}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        self._write_files()
        self.head = Machine("head")
        self._furnish(self.head)
        self.head.run(["ip", "link", "add", "name", "cluster", "type", "bridge"])
        self.head.run(["ip", "addr", "add", f"{_ADDRESS['head']}/24", "dev", "cluster"])
        self.head.run(["ip", "link", "set", "cluster", "up"])
        self.daemons["munged"] = self.head.start(
            [
                *("munged", "--foreground", "--force", f"--key-file={self.folder / 'munge.key'}"),
                *(f"--socket={self.folder / 'munge.socket'}", f"--pid-file={self.folder / 'munged.pid'}"),
                *(f"--log-file={self.folder / 'munged.log'}", f"--seed-file={self.folder / 'munge.seed'}"),
            ],
            self.folder / "munged.out",
        )
        self.until("munged", lambda: (self.folder / "munge.socket").exists())
        self.daemons["slurmctld"] = self.head.start(["slurmctld", "-D", "-c"], self.folder / "slurmctld.out")
        for name in NODES:
            self.add_node(name)
            self.start_slurmd(name)
        self.until("nodes", lambda: self.states() == dict.fromkeys(NODES, "idle"))

    def _write_files(self) -> None:
        folder, etc = self.folder, self.etc
        folder.chmod(0o755)
        etc.mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for index in range(GPUS):
            os.mknod(folder / f"gpu{index}", 0o020666, os.makedev(1, 3))  # as good a device as any
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={_ADDRESS[name]} NodeHostname={name} CPUs=8 Boards=1 SocketsPerBoard=1 "
            f"CoresPerSocket=8 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{GPUS} State=UNKNOWN"
            for name in NODES
        )
        (etc / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
        (etc / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in _ADDRESS.items())
        )
        (folder / "state").mkdir()
        (etc / "slurm.conf").write_text(
            f"""ClusterName=test
SlurmctldHost=head({_ADDRESS["head"]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=20
SlurmdTimeout=4
SlurmctldTimeout=10
MinJobAge=300
BatchStartTimeout=10
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=5
SlurmdParameters=config_overrides
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
        )

    def _furnish(self, machine: Machine) -> None:
        """Give a machine its own configuration and its own folder for sessions."""
        machine.run(["mkdir", "-p", "/etc/slurm"])
        machine.run(["mount", "--bind", str(self.etc), "/etc/slurm"])
        machine.run(["mount", "--bind", str(self.etc / "hosts"), "/etc/hosts"])
        sessions = Path(f"/tmp/splitbench-{os.getuid()}")
        sessions.mkdir(mode=0o700, exist_ok=True)  # only the place to mount on
        own = self.folder / f"sessions-{machine.name}"
        own.mkdir(mode=0o700, exist_ok=True)
        machine.run(["mount", "--bind", str(own), str(sessions)])

    def add_node(self, name: str) -> None:
        """Bring a node up, without its daemon."""
        node = Machine(name, inside=self.head)
        self.nodes[name] = node
        self._furnish(node)
        inner = next(
            line.split()[-2]
            for line in Path(f"/proc/{node.pid}/status").read_text().splitlines()
            if line.startswith("NSpid")
        )
        wire = f"to-{name}"
        self.head.run(
            ["ip", "link", "add", "name", wire, "type", "veth", "peer", "name", "eth0", "netns", inner]
        )
        self.head.run(["ip", "link", "set", wire, "master", "cluster", "up"])
        node.run(["ip", "addr", "add", f"{_ADDRESS[name]}/24", "dev", "eth0"])
        node.run(["ip", "link", "set", "eth0", "up"])

    def start_slurmd(self, name: str) -> None:
        """Start a node's daemon."""
        self.daemons[name] = self.nodes[name].start(
            ["slurmd", "-D", "-N", name], self.folder / f"slurmd-{name}.out"
        )

    def kill_slurmd(self, name: str) -> None:
        """Kill a node's daemon, and nothing else: what it runs goes on."""
        daemon = self.daemons.pop(name)
        (pid,) = [
            pid for pid in _below(daemon.pid) if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmd"
        ]
        os.kill(pid, signal.SIGKILL)
        daemon.wait(20)

    def states(self) -> dict[str, str]:
        """State of every node, as sinfo says it."""
        shown = self.head.run(["sinfo", "-h", "-N", "-o", "%N %T"], check=False)
        return dict(line.split() for line in shown.stdout.splitlines() if len(line.split()) == 2)

    def jobs(self) -> dict[int, str]:
        """State of every job that SLURM still knows."""
        shown = self.head.run(["squeue", "-h", "--states=all", "-o", "%A %T"], check=False)
        return {int(job): state for job, state in (line.split() for line in shown.stdout.splitlines())}

    def wait_for_job(self, job: int, *states: str, limit_s: float = 120) -> str:
        """Wait until a job is in one of these states (default: it has ended); the state."""
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(f"job {job} to be {wanted}", lambda: self.jobs().get(job) in wanted, limit_s)
        return self.jobs()[job]

    def until(self, what: str, condition: Callable[[], object], limit_s: float = 40) -> None:
        """Wait until something holds; a failure shows the ends of all logs."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}\n{self.told()}"
            time.sleep(0.1)

    def told(self, lines: int = 12) -> str:
        """Ends of all logs, for a failure's message."""
        ends = []
        for log in sorted(self.folder.glob("*.log")):
            text = log.read_text(errors="replace").splitlines()[-lines:]
            ends.append(f"--- {log.name}\n" + "\n".join(text))
        return "\n".join([f"jobs {self.jobs()} nodes {self.states()}", *ends])

    def stop(self) -> None:
        """End all, and wait until it has gone."""
        for node in self.nodes.values():
            node.end()
        if hasattr(self, "head"):
            self.head.end()
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)
