# SPDX-License-Identifier: Apache-2.0
"""`splitbench environment`: look at this machine, check it against an experiment, compare two."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from splitbench.environment.difference import differences, read_environment
from splitbench.environment.probe import probe_environment
from splitbench.environment.stage import check_environment
from splitbench.experiment.load import read_yaml
from splitbench.files import write_json
from splitbench.workflow import Workflow

HELP = "look at this machine, check it against an experiment, compare two machines or dates"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The actions `probe`, `check` and `diff`."""
    actions = command.add_subparsers(dest="action", required=True)
    probe = actions.add_parser("probe", help="print the record of this machine")
    probe.add_argument(
        "--python", type=Path, help="interpreter of a serving environment to look into as well"
    )
    probe.add_argument("-o", "--output", type=Path, help="write it to a file instead")
    check = actions.add_parser("check", help="does this machine fit an experiment? Exit code 2 if not")
    check.add_argument("--configfile", type=Path, default=Path("config/config.yaml"))
    check.add_argument("--record", type=Path, help="a record instead of this machine")
    check.add_argument("--json", action="store_true", help="as JSON")
    diff = actions.add_parser("diff", help="how two environments differ, in words; exit code 1 if they do")
    diff.add_argument("a", type=Path, help="a record, or a folder of results")
    diff.add_argument("b", type=Path, help="another one")
    diff.add_argument("--json", action="store_true", help="a list of the differences as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run one action.

    Raises:
        UserError: a file is missing or is no record.
    """
    return {"probe": _probe, "check": _check, "diff": _diff}[arguments.action](arguments)


def _probe(arguments: argparse.Namespace) -> int:
    record = probe_environment(arguments.python)
    if arguments.output is not None:
        write_json(arguments.output, record)
    else:
        sys.stdout.write(json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    flow = Workflow(read_yaml(arguments.configfile), [arguments.configfile])
    if arguments.record is not None:
        record = read_environment(arguments.record)
    else:
        record = probe_environment(flow.serving_python)
    result = check_environment(flow, record)
    if arguments.json:
        sys.stdout.write(json.dumps(result.as_json(flow.experiment.check), indent=2) + "\n")
    else:
        lines = [*result.text(), "fits" if result.fits else f"does not fit: {result.summary()}"]
        sys.stdout.write("\n".join(lines) + "\n")
    return 0 if result.fits else 2


def _diff(arguments: argparse.Namespace) -> int:
    lines = differences(read_environment(arguments.a), read_environment(arguments.b))
    if arguments.json:
        sys.stdout.write(json.dumps(lines, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n".join(lines or ["no difference that counts"]) + "\n")
    return 1 if lines else 0
