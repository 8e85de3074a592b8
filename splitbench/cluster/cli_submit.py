# SPDX-License-Identifier: Apache-2.0
"""`splitbench submit`: hand a whole experiment to SLURM, as one job on a node of its own."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitbench.cluster.script import DEFAULT_LEAD_S, Allocation, OptionValue, gpus_of, render_script
from splitbench.errors import UserError
from splitbench.experiment.load import read_yaml
from splitbench.files import digest8, write_text
from splitbench.workflow import REPOSITORY, Workflow

HELP = "run an experiment in SLURM: one job, one node, GPUs to itself"
PROFILE = REPOSITORY / "profiles" / "slurm"
SBATCH_FILE = "sbatch.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--configfile", type=Path, default=Path("config/config.yaml"), help="the experiment's YAML file"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        help=f"folder of a Snakemake profile, with {SBATCH_FILE}: options of sbatch (default: profiles/slurm)",
    )
    parser.add_argument("--partition", help="which partition")
    parser.add_argument("--account", help="whose account pays")
    parser.add_argument("--time", help="limit, as SLURM writes it: minutes, or [days-]hours:minutes:seconds")
    parser.add_argument(
        "--lead",
        type=int,
        metavar="SECONDS",
        default=DEFAULT_LEAD_S,
        help="begin to end so long before the limit; longer than the longest cell (default: %(default)s)",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any further option of sbatch by its long name, without dashes; may be repeated",
    )
    parser.add_argument("--print", action="store_true", help="print the script and submit nothing")
    parser.add_argument(
        "snakemake", nargs="*", metavar="ARGUMENT", help="for snakemake (targets, options), after --"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the script, submit it, and say how to follow it.

    Raises:
        UserError: the config, an option or SLURM is at fault.
    """
    folder = Path.cwd()
    profile = (arguments.profile or PROFILE).absolute()
    config = arguments.configfile.absolute()
    flow = Workflow(read_yaml(config), [config])
    name = flow.experiment.experiment
    logs = Path(flow.path("logs/slurm"))
    allocation = Allocation(
        # Two experiments may share a name; their folders can't.
        name=f"splitbench-{name}-{digest8(str(folder))}",
        folder=folder,
        output=f"{logs}/%j.log",
        gpus=gpus_of(flow.experiment),
        nodes=max(plan.nodes for plan in flow.cells.plans.values()),
        lead_s=arguments.lead,
        options=sbatch_options(arguments, profile),
    )
    command = [
        *(sys.executable, "-m", "splitbench.cluster.job", "--results", flow.results, "--"),
        *snakemake_command(config, profile, arguments.snakemake),
    ]
    text = render_script(allocation, command)
    if arguments.print:
        sys.stdout.write(text)
        return 0
    logs.mkdir(parents=True, exist_ok=True)
    script = logs / "submit.sh"
    write_text(script, text)
    job = submit(script)
    sys.stdout.write(f"job {job}: log {logs}/{job}.log; look: squeue -j {job}; end: scancel {job}\n")
    return 0


def snakemake_command(config: Path, profile: Path, further: Sequence[str]) -> list[str]:
    """The workflow on the node where it is run, in the folder where it is run."""
    return [
        *(sys.executable, "-m", "snakemake", "--snakefile", str(REPOSITORY / "Snakefile")),
        # A config file is followed by an option: it would take what comes next for another one.
        *("--configfile", str(config), "--workflow-profile", str(profile), *further),
    ]


def submit(script: Path) -> str:
    """Submit a script; the job's number.

    Raises:
        UserError: there is no SLURM, or it refuses.
    """
    if shutil.which("sbatch") is None:
        raise UserError("no sbatch on PATH", mend="run this on a login node of the cluster")
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise UserError(
            f"sbatch refuses: {done.stderr.strip() or done.stdout.strip()}",
            where=str(script),
            mend="mend the option that it names",
        )
    return done.stdout.strip().partition(";")[0]


def sbatch_options(arguments: argparse.Namespace, profile: Path) -> dict[str, OptionValue]:
    """Options from the profile, then from the command line.

    Raises:
        UserError: the profile's file holds something else than options.
    """
    path = profile / SBATCH_FILE
    options: dict[str, OptionValue] = {}
    if path.exists():
        for name, value in read_yaml(path).items():
            options[str(name)] = _plain(value, f"{path}: {name}")
    for name in ("partition", "account", "time"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name)
    for text in arguments.option:
        name, equals, value = text.partition("=")
        options[name] = value if equals else True
    return options


def _plain(value: Any, where: str) -> OptionValue:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise UserError("is neither text nor number nor true", where=where, mend="write it as sbatch wants it")
