# SPDX-License-Identifier: Apache-2.0
"""A config's text reaches an engine's command line as it stands, whatever a shell could read into it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitbench.experiment.load import load_experiment
from splitbench.files import write_text
from splitbench.serving.plan import filled
from splitbench.workflow import REPOSITORY, Workflow
from tests.fakes.experiments import GOOD

MARK = "$(touch pwned)`touch pwned`;touch pwned;\"'\\ ${IFS}&|<>*?~!#\n%s 語 \t"
STUB = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["RECORD"], "a") as out:
    out.write(json.dumps([sys.argv, dict(os.environ)]) + "\\n")
if sys.argv[0].endswith("taskset"):
    os.execvp(sys.argv[3], sys.argv[3:])
"""


def stubs(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        write_text(folder / name, STUB)
        (folder / name).chmod(0o755)
    return folder


def hostile(python: Path, model: str) -> dict[str, Any]:
    return GOOD | {
        "title": MARK,
        "stack": {"name": "s", "python": str(python), "packages": {"vllm": "1"}},
        "model": {"name": "m", "path": model},
        "engine": {
            "args": {"one": MARK, "many": [MARK, "x y"], "mapping": {"key": MARK}},
            "env": {"SOME": MARK, "OTHER": "$HOME"},
        },
        "layouts": {
            "it": {
                "kind": "pd",
                "connector": "lmcache",
                "prefill": {"cores": [0]},
                "decode": {"cores": [1]},
                "connector_options": {"some": MARK, "more": {"inner": MARK}},
                "lmcache_options": {"text": f"a\nEND_OF_FILE\ntouch pwned\n{MARK}", "list": ["END_OF_FILE"]},
            }
        },
    }


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_the_script_hands_on_every_text_as_it_is(tmp_path: Path) -> None:
    odd = tmp_path / "a $(touch pwned) `touch pwned` \"q\" 'q' }x"
    python = stubs(odd, "python") / "python"
    model = str(odd / "model$(touch pwned)")
    flow = Workflow(hostile(python, model), [], REPOSITORY, sources=False)
    script = flow.plan_script("it")
    tools = stubs(tmp_path / "tools", "taskset", "curl")
    record = tmp_path / "record"
    work = tmp_path / "work"
    work.mkdir()
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "RECORD": str(record),
        "SESSION": str(tmp_path / "session"),
        "WORKFLOW_PYTHON": str(python),
        "HOME": "/home/x",
    }
    # Only up to where processes start: then each command is run as `start` would, and leaves its argv and environment.
    head, _, _ = script.partition("# -- run --")
    commands = '"${prefill_0[@]}"; "${decode_0[@]}"; "${proxy[@]}"\n'
    done = subprocess.run(
        ["bash", "-c", head + commands], cwd=work, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.rglob("pwned"))
    runs = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    runs = [(argv, env) for argv, env in runs if not argv[0].endswith("taskset")]
    places = {
        "serving_python": str(python),
        "workflow_python": str(python),
        "repository": str(work),
        "model": model,
        "session": str(tmp_path / "session"),
        "runtime": "",
    }
    plan = filled(flow.cells.plans["it"], places)
    parts = [*plan["engines"], plan["proxy"]]
    assert [argv for argv, _ in runs] == [part["argv"] for part in parts]
    for (_, env), part in zip(runs, parts, strict=True):
        assert env.items() >= part["env"].items()
    assert runs[0][1]["SOME"] == MARK
    for name, text in flow.cells.plans["it"].files.items():
        assert (tmp_path / "session" / name).read_text(encoding="utf-8") == text


def test_comments_of_a_script_hold_one_line_each(tmp_path: Path) -> None:
    """Nothing of the config ends a comment and begins a command."""
    experiment = load_experiment(hostile(tmp_path / "python", "m"))
    flow = Workflow(experiment.model_dump(mode="json"), [], REPOSITORY, sources=False)
    comments = [line for line in flow.plan_script("it").splitlines() if line.lstrip().startswith("#")]
    assert comments
    assert not any("touch pwned" in line for line in comments if "END_OF_FILE" not in line)
