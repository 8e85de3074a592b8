# SPDX-License-Identifier: Apache-2.0
"""The `splitbench` command: what a person does beside `snakemake`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from splitbench import __version__
from splitbench.archive import cli_archive
from splitbench.cluster import cli_submit
from splitbench.environment import cli_bundle, cli_environment
from splitbench.environment.stage import ensure_model, ensure_serving
from splitbench.errors import UserError
from splitbench.experiment import cli_config
from splitbench.experiment.load import read_yaml
from splitbench.experiment.starter import write_starter
from splitbench.measuring import selftest
from splitbench.measuring.estimate import estimate
from splitbench.measuring.stage import places
from splitbench.serving import commands as sessions
from splitbench.serving.session import SessionRequest
from splitbench.tables import cli_import, cli_sql
from splitbench.workflow import QUIET, REPOSITORY, Workflow, say

EXIT_CODES = {
    0: "done; for `config check`: nothing is wrong",
    1: "something that you can mend: one line on standard error for each problem, with file, key and mend; "
    "for `environment diff`: they differ; for `verify`: the archive does not hold",
    2: "the command line itself is wrong; the usage is printed; for `environment check`: the machine does not fit",
    130: "interrupted (Ctrl-C); what was started is being ended",
    141: "whoever read the output has gone (as in `splitbench sql ... | head`)",
}


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; the reference page and the shells' completion are made from it."""
    codes = "\n".join(f"  {code:3d}  {meaning}" for code, meaning in EXIT_CODES.items())
    parser = argparse.ArgumentParser(
        prog="splitbench",
        description=__doc__,
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"splitbench {__version__}")
    parser.add_argument("-q", "--quiet", action="store_true", help="no lines of progress, errors only")
    commands = parser.add_subparsers(dest="command", required=True)
    init = commands.add_parser("init", help="write an experiment to start from, for this machine")
    init.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=Path("config/experiments/mine.yaml"),
        help="where to; its name without .yaml becomes the experiment's",
    )
    init.add_argument(
        "--gpus", type=int, help="plan for so many GPUs; 0: for cores (default: those found here)"
    )
    init.add_argument("--model", help="hub id or folder of the model")
    init.add_argument(
        "--serving-python",
        type=Path,
        default=Path(".splitbench/envs/cuda/bin/python"),
        help="interpreter of a serving environment to use on GPUs, if it has vLLM; else the lock's is built",
    )
    init.add_argument("--force", action="store_true", help="replace a file that is there")
    init.set_defaults(run=_init)
    completion = commands.add_parser("completion", help="print what a shell needs to complete this command")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which shell")
    completion.set_defaults(run=_completion)
    up = commands.add_parser("up", help="start a layout of an experiment and leave it up")
    up.add_argument("layout", help="which of the experiment's layouts")
    up.add_argument(
        "--configfile", type=Path, default=Path("config/config.yaml"), help="the experiment's YAML file"
    )
    up.set_defaults(run=_up)
    cost = commands.add_parser(
        "estimate", help="cells, wall time, accelerator hours and samples before a run"
    )
    cost.add_argument("--configfile", type=Path, default=Path("config/config.yaml"))
    cost.add_argument("--json", action="store_true", help="as JSON")
    cost.set_defaults(run=_estimate)
    sessions.add_commands(commands, up=False)
    for name in ("status", "down", "logs"):
        commands.choices[name].set_defaults(run=sessions.run)
    further = (
        ("config", cli_config),
        ("sql", cli_sql),
        ("import", cli_import),
        ("environment", cli_environment),
        ("selftest-client", selftest),
        ("submit", cli_submit),
    )
    for name, module in further:
        command = commands.add_parser(name, help=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    cli_bundle.add_commands(commands)
    cli_archive.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user's error is one line on stderr and exit code 1."""
    arguments = build_parser().parse_args(argv)
    if arguments.quiet:
        os.environ[QUIET] = "1"  # for what it starts, too
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


def _init(arguments: argparse.Namespace) -> int:
    file: Path = arguments.file
    made_for = write_starter(
        file,
        gpus=arguments.gpus,
        python=arguments.serving_python,
        model=arguments.model,
        schema=REPOSITORY / "config" / "schema.json",
        force=arguments.force,
    )
    print(f"{file}: written for {made_for}; edit it, then: {_called()} config check {shlex.quote(str(file))}")
    return 0


def _called() -> str:
    """This command as the user typed it: it is seldom on the path."""
    typed = sys.argv[0]
    return (
        shlex.quote(typed) if Path(typed).name == "splitbench" and not typed.startswith("/") else "splitbench"
    )


def _completion(arguments: argparse.Namespace) -> int:
    import shtab

    parser = build_parser()
    for each in _parsers(parser):
        for action in each._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=arguments.shell))
    return 0


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """A parser and all of its sub-commands' parsers."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in dict.fromkeys(action.choices.values()):
                found += _parsers(child)
    return found


def _estimate(arguments: argparse.Namespace) -> int:
    flow = Workflow(read_yaml(arguments.configfile), [arguments.configfile])
    found = estimate(flow)
    if arguments.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        for line in found.lines():
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
