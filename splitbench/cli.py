# SPDX-License-Identifier: Apache-2.0
"""The `splitbench` command: what a person does beside `snakemake`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from splitbench import __version__
from splitbench.archive import cli_archive
from splitbench.environment import cli_bundle, cli_environment
from splitbench.environment.stage import ensure_model, ensure_serving
from splitbench.errors import UserError
from splitbench.experiment.load import check_sources, read_experiment, read_yaml
from splitbench.experiment.models import Experiment
from splitbench.measuring.estimate import estimate
from splitbench.measuring.stage import places
from splitbench.serving import commands as sessions
from splitbench.serving.session import SessionRequest
from splitbench.tables import cli_import, cli_sql
from splitbench.workflow import Workflow, say


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user's error is one line on stderr and exit code 1."""
    parser = argparse.ArgumentParser(prog="splitbench", description=__doc__)
    parser.add_argument("--version", action="version", version=f"splitbench {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="look at an experiment's config")
    actions = config.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="say what is wrong with a config, a line a problem")
    check.add_argument("file", type=Path)
    check.set_defaults(run=_config_check)
    schema = actions.add_parser("schema", help="print the JSON Schema that editors use")
    schema.set_defaults(run=_config_schema)
    up = commands.add_parser("up", help="start a layout of an experiment and leave it up")
    up.add_argument("layout")
    up.add_argument("--configfile", type=Path, default=Path("config/config.yaml"))
    up.set_defaults(run=_up)
    cost = commands.add_parser(
        "estimate", help="cells, wall time, accelerator hours and samples before a run"
    )
    cost.add_argument("--configfile", type=Path, default=Path("config/config.yaml"))
    cost.set_defaults(run=_estimate)
    sessions.add_commands(commands, up=False)
    for name in ("status", "down", "logs"):
        commands.choices[name].set_defaults(run=sessions.run)
    for name, module in (("sql", cli_sql), ("import", cli_import), ("environment", cli_environment)):
        command = commands.add_parser(name, help=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    cli_bundle.add_commands(commands)
    cli_archive.add_commands(commands)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except UserError as error:
        for line in str(error).splitlines():
            print(f"splitbench: error: {line}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 141
    except KeyboardInterrupt:
        return 130


def _config_check(arguments: argparse.Namespace) -> int:
    experiment = read_experiment(arguments.file)
    check_sources(experiment, Path.cwd())
    matrix = experiment.matrix
    cells = (
        len(experiment.layouts)
        * len(experiment.workloads)
        * len(matrix.concurrency)
        * matrix.restarts
        * matrix.repeats
    )
    print(f"{arguments.file}: ok, experiment '{experiment.experiment}' with {cells} cells")
    return 0


def schema_text() -> str:
    """JSON Schema of an experiment, as the file in config/ holds it."""
    schema = Experiment.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _config_schema(arguments: argparse.Namespace) -> int:
    del arguments
    sys.stdout.write(schema_text())
    return 0


def _estimate(arguments: argparse.Namespace) -> int:
    flow = Workflow(read_yaml(arguments.configfile), [arguments.configfile])
    for line in estimate(flow).lines():
        print(line)
    return 0


def _up(arguments: argparse.Namespace) -> int:
    flow = Workflow(read_yaml(arguments.configfile), [arguments.configfile])
    if arguments.layout not in flow.experiment.layouts:
        raise UserError(
            f"no layout '{arguments.layout}'",
            where=str(arguments.configfile),
            mend=f"use one of: {', '.join(flow.experiment.layouts)}",
        )
    ensure_serving(flow, say)
    ensure_model(flow, say)
    request = SessionRequest(
        plan=flow.cells.plans[arguments.layout],
        restart=0,
        places=places(flow),
        log_folder=Path(flow.path("logs/sessions")),
        owner=None,
        idle_limit_s=None,
    )
    sessions.bring_up(request)
    return 0


if __name__ == "__main__":
    sys.exit(main())
