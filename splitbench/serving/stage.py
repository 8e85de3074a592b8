# SPDX-License-Identifier: Apache-2.0
"""The plans stage as the workflow calls it."""

from __future__ import annotations

import json
from pathlib import Path

from splitbench.files import write_json, write_text


def write_plan(plan: str, script: str, plan_file: Path, script_file: Path) -> None:
    """Write a plan for programs, and as a script for people, who may run it.

    Args:
        plan: the plan as JSON text.
        script: the script's text.
        plan_file: where the plan goes, readable JSON.
        script_file: where the script goes, executable.
    """
    write_json(plan_file, json.loads(plan))
    write_text(script_file, script)
    script_file.chmod(script_file.stat().st_mode | 0o111)
