# SPDX-License-Identifier: Apache-2.0
"""`splitbench config`: check an experiment, explain its keys, print the schema for editors."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from splitbench.errors import UserError
from splitbench.experiment.explain import explain, find_keys, top_keys
from splitbench.experiment.load import ConfigError, check_sources, read_experiment
from splitbench.experiment.models import Experiment

HELP = "look at an experiment's config"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The actions `check`, `schema` and `explain`."""
    actions = command.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="say what is wrong with a config, a line a problem")
    check.add_argument("file", type=Path, help="the experiment's YAML file")
    check.add_argument("--json", action="store_true", help="the verdict as JSON, problems one by one")
    check.set_defaults(act=_check)
    schema = actions.add_parser("schema", help="print the JSON Schema that editors use")
    schema.set_defaults(act=_schema)
    text = actions.add_parser(
        "explain", help="say what a key means, its default, and what a change runs again"
    )
    text.add_argument("key", nargs="?", help="as in slo.itl_ms or layouts.NAME.gpus (default: all sections)")
    text.add_argument("--json", action="store_true", help="the same as JSON")
    text.set_defaults(act=_explain)


def run(arguments: argparse.Namespace) -> int:
    """Run one action.

    Raises:
        UserError: the config is wrong, or there is no such key.
    """
    return int(arguments.act(arguments))


def schema_text() -> str:
    """JSON Schema of an experiment, as the file in config/ holds it."""
    schema = Experiment.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _check(arguments: argparse.Namespace) -> int:
    try:
        experiment = read_experiment(arguments.file)
        check_sources(experiment, Path.cwd())
    except UserError as error:
        if not arguments.json:
            raise
        _write({"ok": False, "file": str(arguments.file), "problems": _problems(error)})
        return 1
    matrix = experiment.matrix
    cells = (
        len(experiment.layouts)
        * sum(len(each.concurrency or matrix.concurrency) for each in experiment.workloads.values())
        * matrix.restarts
        * matrix.repeats
    )
    name = experiment.experiment
    if arguments.json:
        _write({"ok": True, "file": str(arguments.file), "problems": [], "experiment": name, "cells": cells})
    else:
        sys.stdout.write(f"{arguments.file}: ok, experiment '{name}' with {cells} cells\n")
    return 0


def _problems(error: UserError) -> list[dict[str, str | None]]:
    errors = error.errors if isinstance(error, ConfigError) else (error,)
    return [{"where": each.where, "message": each.message, "mend": each.mend} for each in errors]


def _schema(arguments: argparse.Namespace) -> int:
    del arguments
    sys.stdout.write(schema_text())
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    if not arguments.json:
        sys.stdout.write(explain(arguments.key))
        return 0
    found = find_keys(arguments.key) if arguments.key else top_keys()
    _write(
        [
            {
                "key": key.path,
                "kind": key.kind,
                "meaning": key.meaning,
                "type": key.type.replace("`", ""),
                "default": key.default,
                "reruns": key.reruns,
            }
            for key in found
        ]
    )
    return 0


def _write(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
