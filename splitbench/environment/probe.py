# SPDX-License-Identifier: Apache-2.0
"""The record of an environment: the machine, the software that serves on it, and what each probe came to.

machine    what stays as it is until somebody changes it
moment     what changes by itself: load, heat, processes, error counters, the clock's state
software   the serving environment
probes     per probe: source, status (`ok`, `absent`, `failed: why`), seconds
private    keys whose values name this very machine or what else runs on it; to be left out of what is published
digest     of everything that cells are compared by
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from splitbench.environment.probes import gpu, network, software, system
from splitbench.environment.probes.base import Facts, Outcome, merge, run_probes
from splitbench.files import digest

SCHEMA_VERSION = 2
PRIVATE = (
    "machine.environment",
    "machine.gpus.*.uuid",
    "machine.nics",
    "moment.gpus.*.processes",
    "moment.listening",
)
# Not compared between cells: the workflow's own interpreter, what the shell sets (engines get their variables from
# plans), interfaces that containers bring and take, and everything private.
_NOT_COMPARED = ("environment", "nics")
_GIB = 2**30


def probe_environment(
    serving_python: Path | None, serving: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run every probe and put the record together.

    Args:
        serving_python: interpreter of the serving environment; None leaves the software out.
        serving: record of how that environment was made, kept as it is.
    """
    machine_probes = (*system.PROBES, *gpu.PROBES, *network.PROBES)
    software_probes = software.probes(serving_python) if serving_python is not None else ()
    outcomes = run_probes((*machine_probes, *software_probes))
    return assemble(outcomes[: len(machine_probes)], outcomes[len(machine_probes) :], serving or {})


def assemble(
    machine_outcomes: Sequence[Outcome], software_outcomes: Sequence[Outcome], serving: Mapping[str, Any]
) -> dict[str, Any]:
    """The record from the outcomes of probes; earlier ones have the first word."""
    # Where no probe found any, there are none: that is a fact too.
    machine: Facts = {}
    moment: Facts = {}
    for outcome in machine_outcomes:
        merge(moment, outcome.facts.get("moment", {}))
        merge(machine, {key: value for key, value in outcome.facts.items() if key != "moment"})
    machine.setdefault("gpus", [])
    found: Facts = {}
    for outcome in software_outcomes:
        merge(found, outcome.facts)
    record = anonymous(
        {
            "schema": SCHEMA_VERSION,
            "machine": machine,
            "moment": moment,
            "software": found,
            "serving": dict(serving),
            "probes": {
                outcome.name: {
                    "source": outcome.source,
                    "status": outcome.status,
                    "seconds": outcome.seconds,
                }
                for outcome in (*machine_outcomes, *software_outcomes)
            },
            "private": list(PRIVATE),
            "fingerprint": fingerprint(),
        }
    )
    assert isinstance(record, dict)
    return record | {"digest": environment_digest(record)}


def environment_digest(record: Mapping[str, Any]) -> str:
    """What cells are compared by: machine and software without what is private or changes by itself.

    Records that an older version of the workflow wrote are taken whole.
    """
    if "schema" not in record:
        return digest(dict(record))
    return digest(compared(record))


def compared(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that two environments are told apart by."""
    machine = {key: value for key, value in record["machine"].items() if key not in _NOT_COMPARED}
    machine["gpus"] = [
        {key: value for key, value in found.items() if key != "uuid"} for found in machine.get("gpus", [])
    ]
    machine["system"] = {key: value for key, value in machine.get("system", {}).items() if key != "python"}
    if total := machine.get("memory", {}).get("total_bytes"):
        # The kernel keeps a little more or less for itself at every boot.
        machine["memory"] = {"total_gib": round(total / _GIB)}
    chosen = {key: record["software"].get(key) for key in ("python", "packages", "torch", "ucx", "nixl")}
    # An offline bundle's binaries were slimmed: the same versions, and not the same files.
    chosen["bundle"] = (record.get("serving") or {}).get("bundle")
    return {"machine": machine, "software": chosen}


def fingerprint() -> dict[str, Any]:
    """What tells this machine from most others within milliseconds: no tool is started."""
    models = sorted(
        match[1].strip()
        for path in Path("/proc/driver/nvidia/gpus").glob("*/information")
        if (match := re.search(r"^Model:\s*(.+)$", _text(path), re.MULTILINE))
    )
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    cpu = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    driver = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _text(Path("/proc/driver/nvidia/version")))
    return {
        "kernel": platform.release(),
        "cpu": cpu[1].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20) if memory else None,
        "driver": driver[1] if driver else None,
        "gpus": models,
        "packages_changed": _packages_changed(),
    }


# Where package managers write what is installed: Debian's, and RPM's newer and older one.
_PACKAGE_LISTS = ("/var/lib/dpkg/status", "/var/lib/rpm/rpmdb.sqlite", "/var/lib/rpm/Packages")


def _packages_changed() -> int | None:
    """When a package was last installed or removed, as nanoseconds: OFED, UCX and the fabric manager come that way."""
    times = []
    for name in _PACKAGE_LISTS:
        with suppress(OSError):
            times.append(Path(name).stat().st_mtime_ns)
    return max(times, default=None)


def anonymous(value: Any) -> Any:
    """Plain data without the names of this host, its user and that user's home."""
    home, host = str(Path.home()), socket.gethostname()
    names: list[tuple[re.Pattern[str], str]] = []
    if len(home) > 1:
        names.append((re.compile(rf"{re.escape(home)}(?=/|$|[:;,\s'\"])"), "~"))
    names.append((re.compile(r"/(home|Users)/[^/\s:;,'\"]+"), r"/\1/<user>"))
    if len(host) > 3 and host != "localhost":
        names.append((re.compile(rf"(?<![\w-]){re.escape(host)}(?![\w-])"), "<host>"))

    def walk(part: Any) -> Any:
        if isinstance(part, str):
            for pattern, instead in names:
                part = pattern.sub(instead, part)
            return part
        if isinstance(part, Mapping):
            return {key: walk(item) for key, item in part.items()}
        if isinstance(part, list | tuple):
            return [walk(item) for item in part]
        return part

    return walk(value)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
