# SPDX-License-Identifier: Apache-2.0
"""A short visit to a GPU node without network: unpack, measure in phases, bring results back.

    python3 benchmarks/h200/visit.py [--bundle DIR] [--wait SECONDS] [PHASE ...]

Every call brings the working tree and the bundle's carries that are there to the work folder, appends phases to a
queue, and watches for a while; a runner in an OS session of its own works through the queue, whether somebody watches
or not. What there is by then is packed into the folder of --out. Standard library only; phases run with the bundle's
interpreter.

A phase is NAME[:ARGUMENT ...][@SECONDS]; with `+` in front it runs only if the one before succeeded, with `-` only if
that failed:
    unpack                         the carries, into an environment
    probe                          what the machine's tools say about it
    prepare:EXPERIMENT             environment record, model, plans (by snakemake)
    cells:EXPERIMENT:SELECTION     cells (by snakemake); SELECTION: LAYOUT[:WORKLOAD[:CONCURRENCY,...]]
    report:EXPERIMENT              tables, figures, report of what has been measured (by snakemake)
    bandwidth                      NIXL alone between two processes on the GPU
    sensitivity:EXPERIMENT[:TOKENS ...]   whether the model's answers depend on the whole prompt
    skip                           (not queued) end the phase that runs now
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import filecmp
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
TREE = HERE.parent.parent
STAYS = {".git", ".bundle", ".venv", ".splitbench", ".snakemake", "results", "__pycache__"}
LIMITS_S = {
    "unpack": 120,
    "probe": 30,
    "prepare": 240,
    "cells": 480,
    "report": 120,
    "bandwidth": 90,
    "sensitivity": 90,
}
INTERRUPT_S = 40
IDLE_S = 30
PACK_BYTES = 15 * 2**20
LOG_BYTES = 2 * 2**20
TOOLS = {
    "nvidia-smi-q": ["nvidia-smi", "-q"],
    "nvidia-smi": ["nvidia-smi"],
    "nvidia-smi-topo": ["nvidia-smi", "topo", "-m"],
    "nvidia-smi-nvlink": ["nvidia-smi", "nvlink", "--status"],
    "nvidia-smi-nvlink-errors": ["nvidia-smi", "nvlink", "-e"],
    "nvidia-smi-gpus": [
        "nvidia-smi",
        "--query-gpu=index,name,uuid,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem,"
        "ecc.mode.current,mig.mode.current,compute_mode,persistence_mode",
        "--format=csv",
    ],
    "nvidia-smi-apps": ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv"],
    "lscpu": ["lscpu"],
    "numactl": ["numactl", "--hardware"],
    "lsmod": ["lsmod"],
    "lspci": ["lspci", "-nn"],
    "ibv_devinfo": ["ibv_devinfo"],
    "ibstat": ["ibstat"],
    "ofed_info": ["ofed_info", "-s"],
    "ucx_info": ["ucx_info", "-v"],
    "nvcc": ["nvcc", "--version"],
    "fabricmanager": ["systemctl", "status", "nvidia-fabricmanager"],
    "dpkg-nvidia": ["dpkg-query", "-W", "*nvidia*", "*cuda*", "*doca*", "*ofed*", "*ucx*"],
    "timedatectl": ["timedatectl"],
    "df": ["df", "-h"],
    "mount": ["mount"],
    "ip": ["ip", "-brief", "address"],
    "uname": ["uname", "-a"],
    "pip": [sys.executable, "-m", "pip", "list", "--format=freeze"],
    "python": [
        sys.executable,
        "-c",
        "import sys, sysconfig; print(sys.version, sys.path, sys.flags, sys.prefix)",
    ],
    "torch": [
        sys.executable,
        "-c",
        "import torch as t; print(t.__version__, t.version.cuda, t.__config__.show())",
    ],
}
FILES = ("/proc/cpuinfo", "/proc/meminfo", "/proc/cmdline", "/proc/driver/nvidia/version", "/etc/os-release",
         "/proc/self/limits", "/sys/module/nvidia_peermem/version", "/proc/net/dev")  # fmt: skip


class Visit:
    """Places of a visit, all below one work folder, and its queue."""

    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        self.work = work
        self.repo = work / "repo"
        self.state = work / "visit"
        self.stack = self.repo / ".splitbench" / "envs" / options.stack
        self.options = options
        self.state.mkdir(parents=True, exist_ok=True)

    @property
    def python(self) -> Path:
        """The workflow's interpreter."""
        return self.options.workflow_python or self.stack / "bin" / "python"

    @contextlib.contextmanager
    def locked(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        with (self.state / f"{name}.lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError:
                yield False
                return
            yield True

    def read(self, name: str) -> list[Any]:
        path = self.state / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def append(self, name: str, *values: Any) -> None:
        with self.locked("files"), (self.state / name).open("a", encoding="utf-8") as handle:
            handle.writelines(json.dumps(value) + "\n" for value in values)

    def say(self, text: str) -> None:
        with (self.state / "runner.log").open("a", encoding="utf-8") as handle:
            handle.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    # What a call brings.

    def bring(self, bundle: Path | None) -> None:
        """Copy the working tree (changed files only, since jobs may be running) and the carries that are there."""
        for source in sorted(TREE.rglob("*")):
            relative = source.relative_to(TREE)
            if STAYS & set(relative.parts) or not source.is_file():
                continue
            target = self.repo / relative
            if not target.exists() or not filecmp.cmp(source, target, shallow=False):
                target.parent.mkdir(parents=True, exist_ok=True)
                aside = target.with_name(f".{target.name}.new")
                shutil.copy2(source, aside)
                aside.rename(target)
        for carry in sorted(bundle.glob("carry-*")) if bundle is not None else []:
            if not (self.work / "bundle" / carry.name).exists():
                shutil.copytree(carry, self.work / "bundle" / f".{carry.name}")
                (self.work / "bundle" / f".{carry.name}").rename(self.work / "bundle" / carry.name)

    def start_runner(self) -> None:
        """A runner in its own OS session, unless one is there."""
        with self.locked("runner", wait=False) as free:
            if not free:
                return
        command = [
            sys.executable,
            str(self.repo / "benchmarks" / "h200" / "visit.py"),
            *sys.argv[1:],
            "--runner",
        ]
        with (self.state / "runner.out").open("ab") as output:
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=self.work,
            )

    # What the runner does.

    def run(self) -> None:
        """Work through the queue until it has been empty for a while."""
        with self.locked("runner", wait=False) as mine:
            if not mine:
                return
            samplers = self.sample_gpu()
            idle_until = time.monotonic() + IDLE_S
            while time.monotonic() < idle_until:
                queue, done = self.read("queue.jsonl"), self.read("done.jsonl")
                if len(done) >= len(queue):
                    time.sleep(0.5)
                    continue
                self.append("done.jsonl", self.phase(queue[len(done)], done[-1] if done else None))
                idle_until = time.monotonic() + IDLE_S
            for sampler in samplers:
                sampler.terminate()

    def sample_gpu(self) -> list[subprocess.Popen[bytes]]:
        """Once a second load, clocks and memory; every 5 seconds who is on the GPU."""
        samplers = []
        fields = "timestamp,utilization.gpu,memory.used,clocks.sm,clocks.mem,temperature.gpu,power.draw"
        for name, query, every_s in (
            ("gpu.csv", f"--query-gpu={fields}", "1"),
            ("gpu-processes.csv", "--query-compute-apps=timestamp,pid,process_name,used_memory", "5"),
        ):
            with contextlib.suppress(OSError), (self.state / name).open("ab") as output:
                command = ["nvidia-smi", query, "--format=csv", "-l", every_s]
                samplers.append(subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL))
        return samplers

    def phase(self, text: str, before: dict[str, Any] | None) -> dict[str, Any]:
        """Run one phase within its limit; returns what happened."""
        began = time.time()
        condition, name, arguments, limit_s = parse(text)
        record: dict[str, Any] = {"phase": text, "began": began}
        ok = before is None or before["ok"]
        if (condition == "+" and not ok) or (condition == "-" and ok):
            # What went before it decides about the next condition too.
            return record | {"ok": ok, "seconds": 0.0, "why": "not wanted"}
        self.say(f"{text}: begins, at most {limit_s:.0f} s")
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")
        log = self.state / f"{len(self.read('done.jsonl')):02d}-{slug}.log"
        (self.state / "skip").unlink(missing_ok=True)
        try:
            with log.open("ab") as output:
                why = getattr(self, f"do_{name.replace('-', '_')}")(arguments, began + limit_s, output)
        except Exception as error:  # one phase must not end the visit
            why = f"{type(error).__name__}: {error}"
        record |= {"ok": why is None, "seconds": round(time.time() - began, 1), "why": why}
        self.say(f"{text}: {'ok' if why is None else why}, {record['seconds']:.0f} s")
        return record

    def child(self, command: list[Any], until: float, output: IO[bytes]) -> str | None:
        """Run a program until it ends, its time is over, or somebody skips it; None when it did well."""
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=self.repo,
            env=self.environment(),
        )
        why = None
        while process.poll() is None:
            if time.time() > until or (self.state / "skip").exists():
                why = "was skipped" if (self.state / "skip").exists() else "its time was over"
                for number, grace_s in (
                    (signal.SIGINT, INTERRUPT_S),
                    (signal.SIGTERM, 10),
                    (signal.SIGKILL, 10),
                ):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(grace_s)
                        break
                break
            time.sleep(0.2)
        return why or (f"exit code {process.returncode}" if process.returncode else None)

    def environment(self) -> dict[str, str]:
        """The caller's, with what the bundle sets and the repository's package in front."""
        variables = dict(os.environ)
        settings = self.stack / "environment.sh"
        for line in settings.read_text().splitlines() if settings.exists() else []:
            name, _, value = line.removeprefix("export ").partition("=")
            variables[name] = value.strip("'")
        return variables | {"PYTHONPATH": str(self.repo), "PYTHONUNBUFFERED": "1"}

    def config(self, experiment: str) -> Path:
        """The experiment's file; in a rehearsal a small copy of it for the CPU."""
        path = Path("config") / "experiments" / f"{experiment}.yaml"
        if self.options.rehearse is None:
            return path
        small = path.with_name(f"{experiment}.rehearsal.yaml")
        command = [self.python, HERE / "rehearsal.py", path, self.options.rehearse, small]
        subprocess.run([str(part) for part in command], check=True, cwd=self.repo, env=self.environment())
        return small

    def targets(self, config: Path, *what: str) -> list[str]:
        shown = subprocess.run(
            [str(self.python), str(HERE / "cells.py"), str(config), *what],
            capture_output=True,
            text=True,
            cwd=self.repo,
            env=self.environment(),
            check=False,
        )
        if shown.returncode != 0:
            raise RuntimeError((shown.stderr.strip().splitlines() or ["no targets"])[-1])
        return shown.stdout.split()

    def snakemake(self, config: Path, targets: list[str], until: float, output: IO[bytes]) -> str | None:
        command = [self.python, "-m", "snakemake", "--configfile", config, "--nolock", *targets]
        why = self.child(command, until, output)
        if why is not None:  # whatever is still up would stand in the next phase's way
            self.child([self.python, "-m", "splitbench.cli", "down"], time.time() + 60, output)
        return why

    # The phases.

    def do_unpack(self, arguments: list[str], until: float, output: IO[bytes]) -> str | None:
        carries = sorted((self.work / "bundle").glob("carry-*"))
        if not carries:
            return None if (self.stack / "bundle.json").exists() else "no carry has come yet"
        why = self.child([sys.executable, carries[0] / "bootstrap.py", self.stack, *carries], until, output)
        return why or self.child([sys.executable, "-m", "compileall", "-q", "splitbench"], until, output)

    def do_probe(self, arguments: list[str], until: float, output: IO[bytes]) -> str | None:
        folder = self.state / "probe"
        folder.mkdir(exist_ok=True)
        running = {}
        for name, command in TOOLS.items():
            with (folder / f"{name}.txt").open("wb") as target:
                try:
                    running[name] = subprocess.Popen(command, stdout=target, stderr=subprocess.STDOUT)
                except OSError as error:
                    target.write(f"absent: {error}\n".encode())
        for name, process in running.items():
            try:
                process.wait(max(0.1, until - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                output.write(f"{name}: no answer in time\n".encode())
        for path in FILES:
            with contextlib.suppress(OSError):
                (folder / (path.strip("/").replace("/", "_") + ".txt")).write_bytes(Path(path).read_bytes())
        names = [
            name for name in sorted(os.environ) if not re.search("TOKEN|SECRET|PASS|KEY|CRED|AUTH", name)
        ]
        (folder / "environment.txt").write_text("".join(f"{name}={os.environ[name]}\n" for name in names))
        return None

    def do_prepare(self, arguments: list[str], until: float, output: IO[bytes]) -> str | None:
        config = self.config(arguments[0])
        return self.snakemake(config, self.targets(config, "environment"), until, output)

    def do_cells(self, arguments: list[str], until: float, output: IO[bytes]) -> str | None:
        config = self.config(arguments[0])
        return self.snakemake(config, self.targets(config, "cells", ":".join(arguments[1:])), until, output)

    def do_report(self, arguments: list[str], until: float, output: IO[bytes]) -> str | None:
        config = self.config(arguments[0])
        part = config.with_name(f"{config.stem}.measured.yaml")
        self.targets(config, "complete", str(part))
        # The check first and alone: with fewer layouts it is another one, and a run that makes it anew stops there.
        why = self.snakemake(part, self.targets(part, "environment"), until, output)
        return why or self.snakemake(part, ["all"], until, output)

    def do_bandwidth(self, arguments: list[str], until: float, output: IO[bytes]) -> str | None:
        result = self.state / "nixl-bandwidth.jsonl"
        return self.child([self.python, HERE / "nixl_bandwidth.py", result, *arguments], until, output)

    def do_sensitivity(self, arguments: list[str], until: float, output: IO[bytes]) -> str | None:
        (model,) = self.targets(self.config(arguments[0]), "model")
        result = self.state / f"sensitivity-{arguments[0]}.json"
        python = self.options.rehearse or self.python
        return self.child([python, HERE / "sensitivity.py", model, result, *arguments[1:]], until, output)

    # What comes back.

    def watch(self, seconds: float) -> None:
        """Show what the runner says until the queue is done or the time is over."""
        until = time.monotonic() + seconds
        log = self.state / "runner.log"
        place = 0
        while True:
            ended = len(self.read("done.jsonl")) >= len(self.read("queue.jsonl"))
            if log.exists() and log.stat().st_size > place:
                with log.open("rb") as handle:
                    handle.seek(place)
                    text = handle.read()
                place += len(text)
                sys.stdout.write(text.decode(errors="replace"))
                sys.stdout.flush()
            if ended or time.monotonic() > until:
                return
            self.start_runner()  # the last one may have ended just before the queue grew
            time.sleep(0.5)

    def tails(self, lines: int) -> None:
        """The last lines of the newest logs, for somebody who must decide what comes next."""
        logs = sorted(self.state.glob("[0-9]*.log"), key=lambda path: path.stat().st_mtime)
        for path in logs[-2:]:
            sys.stdout.write(f"--- {path.name}\n")
            sys.stdout.write("\n".join(path.read_text(errors="replace").splitlines()[-lines:]) + "\n")

    def pack(self, out: Path) -> None:
        """Results, logs and probes as a few compressed archives below the size limit."""
        out.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            os.nice(19)  # a measurement may be going on
        results = self.repo / "results"
        groups = {
            "visit": [path for path in self.state.rglob("*") if path.is_file()],
            "results": [p for p in results.rglob("*") if p.is_file() and "logs" not in p.parts],
            "logs": [p for p in results.rglob("*") if p.is_file() and "logs" in p.parts],
        }
        for name, paths in groups.items():
            data = packed(self.work, paths)
            cuts = [data[at : at + PACK_BYTES] for at in range(0, len(data), PACK_BYTES)]
            for number, cut in enumerate(cuts):
                suffix = "" if len(cuts) == 1 else f".{number:02d}"
                (out / f"{name}.tar.xz{suffix}").write_bytes(cut)


def packed(root: Path, paths: list[Path]) -> bytes:
    """A tar.xz of files; the middle of very long ones (logs) is left out."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=1) as tar:
        for path in sorted(paths):
            with contextlib.suppress(OSError):  # a file that a running job takes away
                data = path.read_bytes()
                if path.suffix == ".log" and len(data) > 2 * LOG_BYTES:
                    data = data[:LOG_BYTES] + b"\n... left out ...\n" + data[-LOG_BYTES:]
                info = tarfile.TarInfo(str(path.relative_to(root)))
                info.size, info.mtime = len(data), int(path.stat().st_mtime)
                tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def parse(text: str) -> tuple[str, str, list[str], float]:
    """Condition, name, arguments and limit in seconds of a phase."""
    condition = text[0] if text[0] in "+-" else ""
    body, _, limit = text.removeprefix(condition).partition("@")
    name, *arguments = body.split(":")
    if not hasattr(Visit, f"do_{name.replace('-', '_')}"):
        raise SystemExit(f"no phase '{name}'")
    return condition, name, arguments, float(limit or LIMITS_S.get(name, 60))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/work"), help="kept between calls")
    parser.add_argument("--bundle", type=Path, help="folder with carries; one or all of them")
    parser.add_argument("--stack", default="h200", help="name of the environment that the bundle becomes")
    parser.add_argument(
        "--out", type=Path, help="folder for what is to be brought back, in archives of 15 MiB"
    )
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to watch")
    parser.add_argument("--tail", type=int, default=15, help="lines of the newest logs to show at the end")
    parser.add_argument(
        "--rehearse", type=Path, help="interpreter with vLLM for CPU: small copies of the experiments"
    )
    parser.add_argument("--workflow-python", type=Path, help="default: the bundle's")
    parser.add_argument("--runner", action="store_true", help=argparse.SUPPRESS)
    # Phases may begin with a dash, so the parser must not see them.
    phases = [
        text for text in sys.argv[1:] if re.match(r"[+-]?[a-z][a-z-]*(:|@|$)", text) and text[:2] != "--"
    ]
    options = parser.parse_args([text for text in sys.argv[1:] if text not in phases])
    visit = Visit(options.work.absolute(), options)
    if options.runner:
        visit.run()
        return
    if phases == ["skip"]:
        (visit.state / "skip").touch()
        phases = []
    for text in phases:
        parse(text)
    visit.bring(options.bundle)
    visit.append("queue.jsonl", *phases)
    if len(visit.read("done.jsonl")) < len(visit.read("queue.jsonl")):
        visit.start_runner()
    visit.watch(options.wait)
    visit.tails(options.tail)
    if options.out is not None:
        visit.pack(options.out)


if __name__ == "__main__":
    main()
