# SPDX-License-Identifier: Apache-2.0
"""Which machine this is: by SLURM's name for it, or its own."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from splitbench.files import digest8
from splitbench.serving.state import OWNER_VARIABLE, Owner

# Where the process of OWNER_VARIABLE lives: a pid says nothing on another machine.
PLACE_VARIABLE = "SPLITBENCH_OWNER_PLACE"


def node_name(environ: Mapping[str, str]) -> str:
    """The name by which people know this machine."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def node_now(environ: Mapping[str, str]) -> dict[str, str | None]:
    """This machine for a cell's record.

    Tables and reports hold the label alone: equal for cells of one machine, and without its name, which an archive is
    not to give away.
    """
    name = node_name(environ)
    return {"hostname": name, "label": f"node-{digest8(name)}", "slurm_job": environ.get("SLURM_JOB_ID")}


def own(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that name the owner of sessions to everything that is started from here.

    That is the calling process, unless one was named already on this machine and in this job of SLURM: environments
    travel with jobs to other machines, where the same pid is somebody else.
    """
    place = f"{node_name(environ)}/{environ.get('SLURM_JOB_ID', '')}"
    known = environ.get(OWNER_VARIABLE)
    if known and environ.get(PLACE_VARIABLE, place) == place:
        return {OWNER_VARIABLE: known, PLACE_VARIABLE: place}
    return {OWNER_VARIABLE: str(Owner.current()), PLACE_VARIABLE: place}
