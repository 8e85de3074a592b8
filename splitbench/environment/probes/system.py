# SPDX-License-Identifier: Apache-2.0
"""Probes of the operating system, processor, memory, limits, clock and environment variables."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import psutil

from splitbench.environment.probes.base import (
    AbsentError,
    Ask,
    Command,
    Facts,
    FailedError,
    NotUnderstoodError,
    Probe,
    TextFile,
    Tree,
)
from splitbench.secrets import SECRET_NAME

# Variables that change how engines compute or how KV cache travels. Values of other variables are nobody's business.
RECORDED_VARIABLES = re.compile(
    r"^(UCX_|NCCL_|NIXL_|VLLM_|LMCACHE_|CUDA_|NVIDIA_|TORCH_|OMP_|OPENBLAS_|MKL_|MALLOC_|GOMP_|HF_HUB_OFFLINE$"
    r"|PYTHONHASHSEED$|LD_PRELOAD$|LD_LIBRARY_PATH$)"
)
# A value that carries a name and password, as in redis://user:pass@host.
_WITH_PASSWORD = re.compile(r"(\w+://)[^/@\s]+@")


def parse_os_release(text: str) -> Facts:
    """os-release(5): the system's name and version."""
    values = dict(re.findall(r'^([A-Z_]+)="?(.*?)"?\s*$', text, re.MULTILINE))
    name = values.get("PRETTY_NAME") or values.get("NAME")
    if not name:
        raise NotUnderstoodError("no NAME in it")
    return {"system": {"os": name, "os_id": values.get("ID"), "os_version": values.get("VERSION_ID")}}


def parse_platform(text: str) -> Facts:
    """Lines of `key value` that this process knows about itself."""
    values = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return {
        "system": {key: values[key] for key in ("kernel", "architecture", "python") if key in values},
        "cpu": {"cores_usable": numbers(values.get("cores_usable", ""))},
    }


def parse_lscpu(text: str) -> Facts:
    """`lscpu -J`: model, counts, NUMA nodes.

    Raises:
        NotUnderstoodError: not JSON, or not in English.
    """
    try:
        fields = json.loads(text)["lscpu"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise NotUnderstoodError("not the JSON of lscpu -J") from None
    # util-linux 2.38 and later may nest the fields in groups.
    values: dict[str, str] = {}
    waiting = list(fields) if isinstance(fields, list) else []
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict) and isinstance(item.get("field"), str):
            values[item["field"].rstrip(":")] = str(item.get("data"))
            waiting.extend(item.get("children") or [])
    if "Model name" not in values and "CPU(s)" not in values:
        raise NotUnderstoodError("no field that is known (another language?)")
    threads, cores, sockets = (
        _int(values.get(name)) for name in ("Thread(s) per core", "Core(s) per socket", "Socket(s)")
    )
    flags = set(values.get("Flags", "").split())
    found: Facts = {
        "model": values.get("Model name"),
        "logical": _int(values.get("CPU(s)")),
        "physical": cores * sockets if cores and sockets else None,
        "sockets": sockets,
        "threads_per_core": threads,
        "numa": [
            {"node": int(match[1]), "cores": numbers(cores_of)}
            for name, cores_of in sorted(values.items())
            if (match := re.fullmatch(r"NUMA node(\d+) CPU\(s\)", name))
        ],
        "hypervisor": values.get("Hypervisor vendor"),
    }
    if flags:
        found |= _instructions(flags)
    return {"cpu": {key: value for key, value in found.items() if value is not None}}


def parse_cpuinfo(text: str) -> Facts:
    """/proc/cpuinfo, for machines without lscpu."""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    logical = len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    if not logical:
        raise NotUnderstoodError("no processor in it")
    found: Facts = {"logical": logical}
    if model:
        found["model"] = model[1].strip()
    if flags:
        found |= _instructions(set(flags[1].split()))
    return {"cpu": found}


def _instructions(flags: set[str]) -> Facts:
    return {
        "avx": "avx" in flags,
        "avx2": "avx2" in flags,
        "avx512": "avx512f" in flags,
        "amx": "amx_tile" in flags,
    }


def parse_meminfo(text: str) -> Facts:
    """/proc/meminfo, which counts in KiB."""
    values = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s*(\d+) kB$", text, re.MULTILINE)}
    if "MemTotal" not in values:
        raise NotUnderstoodError("no MemTotal in it")
    return {
        "memory": {"total_bytes": values["MemTotal"], "swap_bytes": values.get("SwapTotal")},
        "moment": {"memory": {"available_bytes": values.get("MemAvailable")}},
    }


def parse_numa_memory(text: str) -> Facts:
    """First lines of the NUMA nodes' meminfo: how much memory each node has."""
    nodes = {
        f"node{node}": int(kib) * 1024 for node, kib in re.findall(r"Node (\d+) MemTotal:\s+(\d+) kB", text)
    }
    return {"memory": {"numa_bytes": nodes}}


def parse_shm(text: str) -> Facts:
    """Size and free space of /dev/shm in bytes."""
    total, free = (int(part) for part in text.split())
    return {"memory": {"shm_total_bytes": total}, "moment": {"memory": {"shm_free_bytes": free}}}


def parse_limits(text: str) -> Facts:
    """/proc/self/limits; None is unlimited."""

    def soft(name: str) -> int | None:
        match = re.search(rf"^{name}\s+(unlimited|\d+)", text, re.MULTILINE)
        if match is None:
            raise NotUnderstoodError(f"no '{name}' in it")
        return None if match[1] == "unlimited" else int(match[1])

    return {
        "limits": {
            "open_files": soft("Max open files"),
            "locked_memory_bytes": soft("Max locked memory"),
            "processes": soft("Max processes"),
        }
    }


def parse_timedatectl(text: str) -> Facts:
    """`timedatectl show`: whether the clock is kept in step."""
    values = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    if "NTPSynchronized" not in values:
        raise NotUnderstoodError("no NTPSynchronized in it")
    return {"moment": {"clock": {"synchronised": values["NTPSynchronized"] == "yes"}}}


def parse_chrony(text: str) -> Facts:
    """`chronyc tracking`: offset from the sources."""
    leap = re.search(r"^Leap status\s*:\s*(.+)$", text, re.MULTILINE)
    offset = re.search(r"^System time\s*:\s*([\d.]+) seconds (slow|fast)", text, re.MULTILINE)
    if leap is None:
        raise NotUnderstoodError("no leap status in it")
    found: Facts = {"synchronised": leap[1].strip() == "Normal"}
    if offset:
        found["offset_ms"] = round(float(offset[1]) * 1e3 * (1 if offset[2] == "fast" else -1), 6)
    return {"moment": {"clock": found}}


def parse_adjtimex(text: str) -> Facts:
    """The kernel's own word: `state status esterror_us`; bit 0x40 of the status says that nobody keeps the clock."""
    state, status, error_us = (int(part) for part in text.split())
    return {
        "moment": {
            "clock": {"synchronised": state != 5 and not status & 0x40, "estimated_error_us": error_us}
        }
    }


def parse_clocksource(text: str) -> Facts:
    """What the kernel counts time with: anything but tsc makes every time stamp dear."""
    name = text.strip()
    if not re.fullmatch(r"[\w-]+", name):
        raise NotUnderstoodError("not a name")
    return {"system": {"clocksource": name}}


def parse_variables(text: str) -> Facts:
    """Environment variables as a JSON object."""
    return {"environment": json.loads(text)}


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter, without those that look like secrets and without passwords in addresses."""
    return {
        name: _WITH_PASSWORD.sub(r"\1<secret>@", value)
        for name, value in sorted(environment.items())
        if RECORDED_VARIABLES.match(name) and not SECRET_NAME.search(name)
    }


def numbers(text: str) -> list[int]:
    """A kernel's list of numbers: `0-2,5` is 0, 1, 2, 5; what is not of that form is left out."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if match:
            found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(found)


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def _ask_platform() -> str:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return "\n".join(
        (
            f"kernel {platform.release()}",
            f"architecture {platform.machine()}",
            f"python {platform.python_version()}",
            f"cores_usable {cores}",
        )
    )


def _ask_shm() -> str:
    try:
        usage = psutil.disk_usage("/dev/shm")
    except OSError:
        raise AbsentError from None
    return f"{usage.total} {usage.free}"


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), up to the fields that are read, with room for the rest."""

    _fields_: ClassVar[Any] = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    ]


def _ask_adjtimex() -> str:
    answer = _Timex()
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "adjtimex"):
        raise AbsentError
    state = library.adjtimex(ctypes.byref(answer))  # modes is 0: only reads
    if state < 0:
        raise FailedError(os.strerror(ctypes.get_errno()))
    return f"{state} {answer.status} {answer.esterror}"


PROBES: tuple[Probe, ...] = (
    Probe("os", TextFile("/etc/os-release"), parse_os_release),
    Probe("platform", Ask("uname(2), sched_getaffinity(2)", _ask_platform), parse_platform),
    Probe("cpu", Command(("lscpu", "-J")), parse_lscpu),
    Probe("cpu-file", TextFile("/proc/cpuinfo"), parse_cpuinfo),
    Probe("memory", TextFile("/proc/meminfo"), parse_meminfo),
    Probe("numa-memory", Tree(("/sys/devices/system/node/node*/meminfo",)), parse_numa_memory),
    Probe("shm", Ask("statvfs /dev/shm", _ask_shm), parse_shm),
    Probe("limits", TextFile("/proc/self/limits"), parse_limits),
    Probe("clock-timedatectl", Command(("timedatectl", "show")), parse_timedatectl),
    Probe("clock-chrony", Command(("chronyc", "-n", "tracking")), parse_chrony),
    Probe("clock-kernel", Ask("adjtimex(2)", _ask_adjtimex), parse_adjtimex),
    Probe(
        "clocksource",
        TextFile("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        parse_clocksource,
    ),
    Probe(
        "variables",
        Ask("environ(7)", lambda: json.dumps(recorded_variables(os.environ))),
        parse_variables,
    ),
)
