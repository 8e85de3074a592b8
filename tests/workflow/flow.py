# SPDX-License-Identifier: Apache-2.0
"""A folder in which the real workflow runs on stubbed engines, as a user would run it."""

from __future__ import annotations

import atexit
import copy
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.layouts import STUB, free_ports
from tests.workflow.planner import Planner

REPOSITORY = Path(__file__).parents[2]
SNAKEMAKE = Path(sys.executable).parent / "snakemake"
STUB_VERSION = "0.32.0+stub"
SECRET = "hf_SesameOpenThouDoor1234567890abcdef"
"""What the shell of every run has in its variables, and what nothing that a run writes or starts may show."""
SECRETS = {
    "HF_TOKEN": SECRET,
    "VLLM_API_KEY": SECRET,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "LMCACHE_AUTH": SECRET,
}
PLANNER = Planner()


def stub_python(folder: Path) -> Path:
    """An interpreter that finds the stub under the name of vLLM, like a serving environment made elsewhere."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "stub.pth").write_text(f"{STUB}\n", encoding="utf-8")
    # By name only: the check of the environment wants what the layouts' connector needs to be installed.
    for name, version in (("vllm", STUB_VERSION), ("nixl", "1.5.1"), ("lmcache", "0.5.6")):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
        )
    return folder / "bin" / "python"


def default_config(python: Path, base_port: int) -> dict[str, Any]:
    """A small experiment: two layouts, two workloads, two loads."""
    return {
        "experiment": "tiny",
        "title": "Stubbed engines",
        "stack": {"name": "stub", "python": str(python), "packages": {"vllm": STUB_VERSION}},
        "model": {"name": "stub", "synthetic": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2}},
        # The client's self-test takes seconds: only runs that are about it have it.
        "node": {"base_port": base_port, "selftest_streams": []},
        "engine": {"startup_limit_s": 30, "env": {"VLLM_STUB_STEP_MS": "2", "VLLM_STUB_STARTUP_S": "0.1"}},
        "layouts": {
            "agg": {"kind": "aggregated", "cores": [0]},
            "pd": {"kind": "pd", "connector": "nixl", "prefill": {"cores": [0]}, "decode": {"cores": [1]}},
        },
        "workloads": {
            "long": {"input_tokens": 64, "output_tokens": 8, "prompts": {"per_concurrency": 3}},
            "short": {"input_tokens": 16, "output_tokens": 8, "prompts": {"per_concurrency": 3}},
        },
        "matrix": {"concurrency": [1, 2]},
    }


class Flow:
    """One working folder of the workflow.

    Args:
        folder: empty; results go there.
        python: the interpreter of the stubbed serving environment.
        config: what to run; default: a small experiment.
        store: where environments and models are; default: of its own.
    """

    def __init__(
        self,
        folder: Path,
        python: Path,
        *,
        config: dict[str, Any] | None = None,
        store: Path | None = None,
    ) -> None:
        self.folder = folder
        self.store = store or folder / "store"
        self.config = config or default_config(python, free_ports(1)[0])
        folder.mkdir(parents=True, exist_ok=True)
        # Beside the folder, whose path pytest makes longer than a socket's may be.
        self.state = Path(tempfile.mkdtemp(prefix="sb-test-"))
        atexit.register(shutil.rmtree, self.state, ignore_errors=True)
        self.extra: dict[str, str] = {}

    @property
    def results(self) -> Path:
        """The experiment's results."""
        return self.folder / "results" / str(self.config["experiment"])

    def edited(self, path: str, value: Any) -> dict[str, Any]:
        """A copy of the config with the value at `a/b/c` changed."""
        changed = copy.deepcopy(self.config)
        *parents, last = path.split("/")
        place: Any = changed
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
        return changed

    def command(
        self, *arguments: str, config: dict[str, Any] | None = None, text: str | None = None
    ) -> list[str]:
        """The command line for a config, which is written first."""
        file = self.folder / "experiment.yaml"
        file.write_text(text if text is not None else yaml.safe_dump(config or self.config), encoding="utf-8")
        return [
            *(str(SNAKEMAKE), "--snakefile", str(REPOSITORY / "Snakefile"), "--directory", str(self.folder)),
            *("--configfile", str(file), "--cores", "2", *arguments),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the command: state and store of its own, no owner inherited from a surrounding run."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPLITBENCH_")}
        return (
            kept
            | SECRETS
            | {
                "SPLITBENCH_STATE": str(self.state),
                "SPLITBENCH_STORE": str(self.store),
                "PYTHONUNBUFFERED": "1",
            }
            | self.extra
        )

    def run(self, *arguments: str, limit_s: float = 300, **config: Any) -> subprocess.CompletedProcess[str]:
        """Run the workflow to its end; a dry run from a process that has imported what it needs."""
        if "-n" in arguments:
            return PLANNER.run(self.command(*arguments, **config)[1:], self.environment)
        return self.run_command(self.command(*arguments, **config), limit_s=limit_s)

    def run_command(self, command: list[str], *, limit_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command in this folder's environment to its end."""
        return subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def start(self, *arguments: str, **config: Any) -> subprocess.Popen[str]:
        """Start the workflow in a process group of its own, as a terminal does; output goes to a file."""
        log = (self.folder / "run.log").open("w", encoding="utf-8")
        return subprocess.Popen(
            self.command(*arguments, **config),
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def planned(self, *arguments: str, **config: Any) -> dict[str, int]:
        """Number of jobs per rule that would run."""
        shown = self.run("-n", *arguments, "--quiet", "rules", **config)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        table = re.findall(r"^([a-z_]+)\s+(\d+)$", shown.stdout + shown.stderr, re.MULTILINE)
        return {name: int(count) for name, count in table if name not in ("total", "all")}

    def ours(self) -> list[int]:
        """Processes that carry this folder's state in their environment: engines, proxies, clients, supervisors."""
        mark = f"SPLITBENCH_STATE={self.state}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                        assert SECRET.encode() not in (entry / "cmdline").read_bytes()
                except OSError:
                    continue
        return found

    def gone(self, limit_s: float = 20.0) -> list[int]:
        """Wait until none of our processes is left; what is still there when the time is over."""
        deadline = time.monotonic() + limit_s
        while (left := self.ours()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def telling(self) -> list[Path]:
        """Files that hold the shell's secret, packed or not, and files of the state that others may open."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        open_to_others = [
            path for path in (self.state, *self.state.rglob("*.sock")) if path.stat().st_mode & 0o077
        ]
        return open_to_others + [
            path for path in files if self.store not in path.parents and SECRET.encode() in _content(path)
        ]

    def status(self) -> dict[str, str]:
        """Status of every cell that was started."""
        return {
            str(path.parent.relative_to(self.results / "cells")): json.loads(path.read_text())["status"]
            for path in self.results.glob("cells/*/*/*/*/status.json")
        }


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".gz" and data:
        with suppress(OSError, EOFError, zlib.error):  # a test may have damaged it
            return gzip.decompress(data)
    return data
