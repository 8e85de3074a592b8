# SPDX-License-Identifier: Apache-2.0
"""Who holds a TCP port of this machine, on whichever address.

A server of somebody else on 0.0.0.0:PORT answers on 127.0.0.1:PORT too and would pass for ours, so a port
counts as free only when nobody has it on any address, and a server as ours only when the listening socket is
held by a process that we started.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from splitbench.serving.processes import command_line

_LISTENING = "0A"


def is_free(port: int) -> bool:
    """True when a server could listen on the port on every address, IPv4 and IPv6.

    With SO_REUSEADDR, as servers have it: connections that linger after an end (TIME_WAIT) do not count.
    """
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    probe.bind((address, port))
                    probe.listen(1)
                except PermissionError:  # a port below 1024: nothing can be said by trying
                    return not _inodes(port, listening=True)
                except OSError as error:
                    if family == socket.AF_INET6 and error.errno not in (98, 48):
                        continue  # IPv6 is switched off
                    return False
        except OSError:
            continue  # a machine without this family
    return True


def busy(ports: Iterable[int]) -> list[int]:
    """The ports that somebody holds, in order."""
    return [port for port in ports if not is_free(port)]


def _inodes(port: int, *, listening: bool) -> set[str]:
    """Inodes of the sockets with this local port."""
    wanted = f"{port:04X}"
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[1].rpartition(":")[2] == wanted and (fields[3] == _LISTENING or not listening):
                    found.add(fields[9])
    return found


def _sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds; empty when they may not be seen."""
    found: set[str] = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def holder(port: int) -> str:
    """Who holds the port, for a person: "pid 4711 (python -m http.server)", or that it can't be told."""
    inodes = _inodes(port, listening=True) or _inodes(port, listening=False)
    if inodes:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and inodes & _sockets(int(entry.name)):
                return f"pid {entry.name} ({command_line(int(entry.name))})"
    return "a process that this user may not see"


def listened_by(port: int, pids: Iterable[int]) -> bool | None:
    """Whether every socket that listens on the port is held by one of these processes.

    None when nobody listens, or /proc does not tell.
    """
    inodes = _inodes(port, listening=True)
    if not inodes:
        return None
    held: set[str] = set()
    for pid in pids:
        held |= _sockets(pid)
    return inodes <= held
