# SPDX-License-Identifier: Apache-2.0
"""The plan's script, run as a person would: it brings the layout up, and leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.workflow.flow import Flow

TOOLS = ("bash", "curl", "setsid", "taskset")


@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}")
def test_a_plans_script_brings_the_layout_up_and_ends_it(flow: Flow) -> None:
    done = flow.run("plans", config=flow.edited("layouts/pd/trace", True))
    assert done.returncode == 0, done.stdout + done.stderr
    script = flow.results / "plans" / "pd.sh"
    assert os.access(script, os.X_OK)
    session = flow.folder / "by hand"
    environment = flow.environment | {
        "REPOSITORY": str(Path(__file__).parents[2]),
        "WORKFLOW_PYTHON": sys.executable,
        "MODEL": "stub-model",
        "SESSION": str(session),
        # What the shell happens to have must not reach the engines.
        "VLLM_STUB_DIE_EARLY": "RuntimeError: a variable of the shell",
        "SPLITBENCH_STATE": str(flow.state),
    }
    with subprocess.Popen(
        [str(script)], env=environment, stdout=subprocess.PIPE, text=True, cwd=flow.folder
    ) as running:
        assert running.stdout is not None
        said = []
        for line in running.stdout:
            said.append(line)
            if line.startswith("up at "):
                break
        output = "".join(said)
        assert '"text":' in output.replace(" ", "") or '"choices"' in output, output
        front = said[-1].split()[2].rstrip(";")
        with urllib.request.urlopen(f"{front}/v1/models", timeout=10) as answer:
            assert answer.status == 200
        assert len(flow.ours()) >= 3
        running.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        running.wait(60)
        assert time.monotonic() - begun < 15
    assert flow.gone() == []
    assert (session / "proxy-trace.jsonl").read_text().count("\n") == 1
    assert "Application startup complete" in (session / "decode-0.log").read_text()
