# SPDX-License-Identifier: Apache-2.0
"""The sbatch script of a whole workflow: rendered from lists, so that no text of a config is ever read by a shell.

Options are sbatch's own, by their long names. What follows from the experiment (GPUs) and from how sessions end
(signal, requeue) has defaults here; a profile's `sbatch.yaml` and the command line set the rest.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitbench.errors import UserError
from splitbench.experiment.models import Experiment

OptionValue = str | int | float | bool | None
# Told to the job's own process and to nobody else; TERM is what scancel and preemption send.
LIMIT_SIGNAL = "USR1"
BACKSLASH = "\\"
# The longest cell that is still brought to its end before the time limit, seconds.
DEFAULT_LEAD_S = 600
# What the script sets because the job's own program relies on it.
_OWNED = frozenset({"chdir", "signal", "output", "error", "open-mode", "wrap", "array", "ntasks", "parsable"})


@dataclass(frozen=True)
class Allocation:
    """What is asked of SLURM for one experiment.

    Args:
        name: the job's name; of two jobs with the same name the second waits (`dependency: singleton`).
        folder: where the workflow works: results are below it. On a disk that all nodes see.
        output: the job's log, relative to `folder`.
        gpus: GPUs per node, 0 for none.
        nodes: how many nodes layouts are spread over.
        lead_s: seconds before the time limit at which the job begins to end.
        options: further options of sbatch, which win over the defaults.
    """

    name: str
    folder: Path
    output: str
    gpus: int
    nodes: int = 1
    lead_s: int = DEFAULT_LEAD_S
    options: Mapping[str, OptionValue] | None = None

    def all_options(self) -> dict[str, OptionValue]:
        """Every option, by its long name.

        Raises:
            UserError: an option is not one, or is set by the script itself.
        """
        if {BACKSLASH, "%"} & set(str(self.folder)):
            raise UserError(
                "SLURM gives % and backslash in the path of a job's log a meaning of their own",
                where=str(self.folder),
                mend="work in a folder without them",
            )
        given = dict(self.options or {})
        for name, value in given.items():
            if not re.fullmatch(r"[a-z][a-z-]*", name):
                raise UserError(
                    f"'{name}' is not an option of sbatch", mend="write it as 'partition', without dashes"
                )
            if name in _OWNED:
                raise UserError(f"sbatch's '{name}' is set by the script", mend="remove it")
            if isinstance(value, str) and not value.isprintable():
                raise UserError(f"sbatch's '{name}' has a character that can't be printed", mend="remove it")
        defaults: dict[str, OptionValue] = {
            "job-name": self.name,
            "dependency": "singleton",
            "exclusive": True,
            "nodes": self.nodes,
            "gres": f"gpu:{self.gpus}" if self.gpus and not _names_gpus(given) else None,
            "requeue": True,
        }
        return (
            defaults
            | given
            | {
                "ntasks-per-node": 1,
                "chdir": str(self.folder),
                "output": self.output,
                "open-mode": "append",
                "signal": f"B:{LIMIT_SIGNAL}@{self.lead_s}",
            }
        )


def _names_gpus(options: Mapping[str, OptionValue]) -> bool:
    return any(name.startswith(("gres", "gpus")) for name in options)


def directive(name: str, value: OptionValue) -> str | None:
    """One `#SBATCH` line; None where the option is off.

    sbatch reads quotes there as a shell does, but takes a backslash for an escape inside of single quotes as well.

    Raises:
        UserError: it can't be written on one line.
    """
    if value is None or value is False:
        return None
    if value is True:
        return f"#SBATCH --{name}"
    text = str(value)
    if not text.isprintable():
        raise UserError(f"sbatch's '{name}' has a character that can't be printed", mend="rename it")
    return f"#SBATCH --{name}={shlex.quote(text.replace(BACKSLASH, 2 * BACKSLASH))}"


def render_script(allocation: Allocation, command: Sequence[str]) -> str:
    """The whole script: options, then the command in place of the shell.

    Args:
        allocation: what is asked of SLURM.
        command: the program and its arguments; quoted here.

    Raises:
        UserError: an option is wrong, or an argument has a line break.
    """
    lines = [directive(name, value) for name, value in sorted(allocation.all_options().items())]
    for text in command:
        if "\n" in text or "\0" in text:
            raise UserError(f"{text!r} can't be passed on to a job", mend="rename it")
    return "\n".join(
        [
            "#!/bin/sh",
            "# Made by `splitbench submit`; edit profiles/slurm/sbatch.yaml and submit again instead.",
            *(line for line in lines if line is not None),
            f"exec {shlex.join(command)}",
            "",
        ]
    )


def gpus_of(experiment: Experiment) -> int:
    """GPUs that a node must have for every layout: the largest index, and one; 0 where layouts run on cores."""
    devices = [
        device
        for layout in experiment.layouts.values()
        for each in layout.engines()
        for device in each.gpus or ()
    ]
    return max(devices) + 1 if devices else 0
