# SPDX-License-Identifier: Apache-2.0
"""What machine this is: enough to tell two runs on different machines apart.

A tool or device that is missing gives null, never an error.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from pathlib import Path
from typing import Any

import psutil

# Variables that change how engines compute or how KV cache travels. Values of other variables are nobody's business.
RECORDED_ENVIRONMENT = re.compile(r"^(UCX_|NCCL_|VLLM_|LMCACHE_|CUDA_|OMP_|PYTHONHASHSEED$|OPENBLAS_)")
SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL)", re.IGNORECASE)


def probe_machine() -> dict[str, Any]:
    """The machine as plain data: system, processor, memory, GPUs, limits, variables that matter."""
    return {
        "system": {
            "os": _os_name(),
            "kernel": platform.release(),
            "architecture": platform.machine(),
            "python": platform.python_version(),
        },
        "cpu": {
            "model": _cpu_model(),
            "cores_usable": sorted(os.sched_getaffinity(0)),
            "logical": psutil.cpu_count(logical=True),
            "physical": psutil.cpu_count(logical=False),
            "avx512": "avx512f" in _cpu_flags(),
        },
        "memory": {
            "total_bytes": psutil.virtual_memory().total,
            "shm_bytes": _free_bytes(Path("/dev/shm")),
        },
        "gpus": probe_gpus(),
        "limits": {
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "locked_memory_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        },
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if RECORDED_ENVIRONMENT.match(name) and not SECRET.search(name)
        },
    }


def probe_gpus() -> list[dict[str, Any]]:
    """NVIDIA GPUs of this machine: index, name, memory in bytes, driver; empty where there are none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(
                {
                    "index": index,
                    "name": _text(pynvml.nvmlDeviceGetName(handle)),
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    "driver": driver,
                }
            )
        return gpus
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _os_name() -> str | None:
    match = re.search(r'^PRETTY_NAME="?(.*?)"?$', _read("/etc/os-release"), re.MULTILINE)
    return match.group(1) if match else None


def _cpu_model() -> str | None:
    match = re.search(r"^model name\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match.group(1).strip() if match else None


def _cpu_flags() -> set[str]:
    match = re.search(r"^flags\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return set(match.group(1).split()) if match else set()


def _free_bytes(path: Path) -> int | None:
    try:
        return int(psutil.disk_usage(str(path)).free)
    except OSError:
        return None
