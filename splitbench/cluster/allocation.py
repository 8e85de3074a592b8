# SPDX-License-Identifier: Apache-2.0
"""The nodes of the allocation that this process runs in."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping

from splitbench.errors import UserError


def node_names(environ: Mapping[str, str]) -> list[str]:
    """Names of the allocation's nodes, this one first, the others in SLURM's order.

    Raises:
        UserError: this is no allocation, or SLURM does not answer.
    """
    listed = environ.get("SLURM_JOB_NODELIST")
    if not listed:
        raise UserError("this is not in an allocation of SLURM", mend="start it with splitbench submit")
    names = _scontrol("hostnames", listed).split()
    here = environ.get("SLURMD_NODENAME", "")
    return [here, *(name for name in names if name != here)] if here in names else names


def allocated(count: int) -> tuple[str, ...]:
    """Addresses of the first nodes of the allocation; none where one node is enough.

    Raises:
        UserError: there are not so many.
    """
    if count < 2:
        return ()
    names = node_names(os.environ)
    if len(names) < count:
        raise UserError(
            f"layouts are spread over {count} nodes, and this allocation has {len(names)}",
            where="layouts",
            mend=f"submit it with --option nodes={count}",
        )
    return tuple(map(_address, names[:count]))


def _address(name: str) -> str:
    """IPv4 address of a node: engines bind it, and some of what they bind takes no name."""
    known = re.search(r"\bNodeAddr=(\S+)", _scontrol("node", name))
    host = known[1] if known else name
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise UserError(f"node {name} has no address ({error})", mend="ask your cluster's staff") from None


def _scontrol(what: str, argument: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", "show", what, argument], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"scontrol does not answer ({error})", mend="run this in a job of SLURM") from None
    return done.stdout
