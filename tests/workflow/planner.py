# SPDX-License-Identifier: Apache-2.0
"""Dry runs from a warm process: Snakemake is imported once, then every run is a fork of that.

A dry run is 2.7 s of processor time, 2 s of them imports, and the tests of what runs again make dozens. The fork runs
Snakemake's own `main` on the same command line, folder and environment as a run from a shell.

    -> {"argv": [...], "env": {...}, "stdout": PATH, "stderr": PATH}     one line each way
    <- {"code": 0}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


class Planner:
    """The tests' side; the process behind it starts with the first run, and ends when this one does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, argv: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """One run of `snakemake` with these arguments, to its end."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.workflow.planner"],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            streams = {name: str(Path(folder) / name) for name in ("stdout", "stderr")}
            self._process.stdin.write(json.dumps({"argv": argv, "env": env, **streams}) + "\n")
            self._process.stdin.flush()
            code = json.loads(self._process.stdout.readline())["code"]
            texts = {name: Path(path).read_text(encoding="utf-8") for name, path in streams.items()}
        return subprocess.CompletedProcess(["snakemake", *argv], code, **texts)


def _serve() -> None:
    # What every dry run imports sooner or later.
    import pandas  # noqa: F401
    import snakemake.cli
    import snakemake.dag
    import snakemake.persistence
    import snakemake.workflow  # noqa: F401

    import splitbench.measuring.stage
    import splitbench.workflow  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(json.dumps({"code": os.waitstatus_to_exitcode(status)}) + "\n")
        sys.stdout.flush()


def _become(request: dict[str, Any]) -> None:
    """The fork: never returns."""
    from snakemake.cli import main

    code = 1
    try:
        for number, name in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
            file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = ["snakemake", *request["argv"]]
        main(request["argv"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
