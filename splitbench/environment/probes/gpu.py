# SPDX-License-Identifier: Apache-2.0
"""Probes of NVIDIA GPUs: the devices, how they are linked, the driver, the CUDA toolkit, the fabric manager."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from typing import Any

from splitbench.environment.probes.base import (
    AbsentError,
    Ask,
    Command,
    Facts,
    NotUnderstoodError,
    Probe,
    TextFile,
    Tree,
)
from splitbench.environment.probes.system import numbers

MIB = 2**20
# Without persistence mode the driver loads all GPUs anew for every question: seconds each.
_SMI_LIMIT_S = 20.0


def parse_smi(text: str) -> Facts:
    """`nvidia-smi -q -x`: driver and GPUs; what changes by itself (load, heat, processes) under `moment`.

    Raises:
        NotUnderstoodError: not that XML.
    """
    try:
        root = ET.fromstring(text)
    except ET.ParseError:
        raise NotUnderstoodError(_smi_complaint(text)) from None
    if root.tag != "nvidia_smi_log":
        raise NotUnderstoodError(f"<{root.tag[:40]}> instead of <nvidia_smi_log>")
    gpus = root.findall("gpu")
    return {
        "driver": {"version": _value(root, "driver_version"), "cuda": _value(root, "cuda_version")},
        "gpus": [_gpu(index, gpu) for index, gpu in enumerate(gpus)],
        "moment": {"gpus": [_gpu_now(index, gpu) for index, gpu in enumerate(gpus)]},
    }


def _gpu(index: int, gpu: ET.Element) -> Facts:
    power = "gpu_power_readings" if gpu.find("gpu_power_readings") is not None else "power_readings"
    return {
        "index": index,
        "name": _value(gpu, "product_name"),
        "architecture": _value(gpu, "product_architecture"),
        "uuid": _value(gpu, "uuid"),
        "memory_bytes": _amount(gpu, "fb_memory_usage/total", MIB),
        "vbios": _value(gpu, "vbios_version"),
        "persistence": _on(gpu, "persistence_mode"),
        "compute_mode": _value(gpu, "compute_mode"),
        "mig": _on(gpu, "mig_mode/current_mig"),
        "ecc": _on(gpu, "ecc_mode/current_ecc"),
        "power_limit_w": _amount(gpu, f"{power}/current_power_limit", 1)
        or _amount(gpu, f"{power}/enforced_power_limit", 1),
        "power_limit_default_w": _amount(gpu, f"{power}/default_power_limit", 1),
        "max_clock_sm_mhz": _amount(gpu, "max_clocks/sm_clock", 1),
        "max_clock_memory_mhz": _amount(gpu, "max_clocks/mem_clock", 1),
        "application_clock_sm_mhz": _amount(gpu, "applications_clocks/graphics_clock", 1),
        "pcie_generation": _amount(gpu, "pci/pci_gpu_link_info/pcie_gen/max_link_gen", 1),
        "pcie_width": _value(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width"),
    }


def _gpu_now(index: int, gpu: ET.Element) -> Facts:
    reasons = gpu.find("clocks_event_reasons")
    prefix = "clocks_event_reason_"
    if reasons is None:  # drivers before 535 say throttle
        reasons, prefix = gpu.find("clocks_throttle_reasons"), "clocks_throttle_reason_"
    return {
        "index": index,
        "memory_used_bytes": _amount(gpu, "fb_memory_usage/used", MIB),
        "temperature_c": _amount(gpu, "temperature/gpu_temp", 1),
        "clock_sm_mhz": _amount(gpu, "clocks/sm_clock", 1),
        "clocks_held_by": sorted(
            reason.tag.removeprefix(prefix)
            for reason in (reasons if reasons is not None else ())
            if (reason.text or "").strip() == "Active"
        ),
        "fabric": _value(gpu, "fabric/state"),
        "fabric_status": _value(gpu, "fabric/status"),
        "ecc_uncorrected": _amount(gpu, "ecc_errors/aggregate/dram_uncorrectable", 1),
        "processes": [
            {
                "pid": _amount(process, "pid", 1),
                "name": _value(process, "process_name"),
                "memory_bytes": _amount(process, "used_memory", MIB),
            }
            for process in gpu.findall("processes/process_info")
        ],
    }


def _smi_complaint(text: str) -> str:
    """nvidia-smi says on standard output what keeps it from answering."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
    return line[:120] if not line.startswith("<") else "the XML is cut off or damaged"


def _value(parent: ET.Element, path: str) -> str | None:
    text = (parent.findtext(path) or "").strip()
    return (
        None
        if text in ("", "N/A", "[N/A]", "Unknown Error", "Requested functionality has been deprecated")
        else text
    )


def _on(parent: ET.Element, path: str) -> bool | None:
    text = _value(parent, path)
    return None if text is None else text == "Enabled"


def _amount(parent: ET.Element, path: str, factor: int) -> int | None:
    match = re.match(r"(\d+)(?:\.\d+)?(?:\s|$)", _value(parent, path) or "")
    return int(match[1]) * factor if match else None


def parse_topology(text: str) -> Facts:
    """`nvidia-smi topo -m`: how each GPU (and NIC) reaches each other, and its cores and NUMA node.

    Raises:
        NotUnderstoodError: no matrix of this form.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the header is underlined even in a pipe
    lines = [[cell.strip() for cell in line.split("\t")] for line in plain.splitlines() if "\t" in line]
    header = next((cells for cells in lines if "CPU Affinity" in cells), None)
    if header is None:
        raise NotUnderstoodError("no header with 'CPU Affinity'")
    names = [cell for cell in header[: header.index("CPU Affinity")] if cell]
    links: dict[str, dict[str, str]] = {}
    affinity: dict[str, Any] = {}
    for cells in lines:
        if cells[0] not in names or len(cells) <= len(names):
            continue
        row = cells[1 : len(names) + 1]
        links[cells[0]] = {
            other: how for other, how in zip(names, row, strict=True) if other != cells[0] and how
        }
        more = dict(zip(header[header.index("CPU Affinity") :], cells[len(names) + 1 :], strict=False))
        if more.get("CPU Affinity"):
            affinity[cells[0]] = {
                "cores": numbers(more["CPU Affinity"]),
                "numa": numbers(more.get("NUMA Affinity", "")),
            }
    if not links:
        raise NotUnderstoodError("no row of the matrix")
    nics = dict(re.findall(r"^\s+(NIC\d+):\s*(\S+)\s*$", plain, re.MULTILINE))
    return {"topology": {"links": links, "affinity": affinity, "nics": nics}}


def parse_nvlink_status(text: str) -> Facts:
    """`nvidia-smi nvlink -s`: speed of every link per GPU in GB/s; 0 for one that is inactive."""
    found: list[Facts] = []
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            found.append({"index": int(match[1]), "links_gb_s": []})
        elif (
            match := re.match(r"\s+Link \d+: (?:([\d.]+) GB/s|<?inactive>?)", line, re.IGNORECASE)
        ) and found:
            found[-1]["links_gb_s"].append(float(match[1] or 0))
    if text.strip() and not found:
        raise NotUnderstoodError(_smi_complaint(text))
    return {"nvlink": found}


def parse_nvlink_errors(text: str) -> Facts:
    """`nvidia-smi nvlink -e`: sum of every error counter per GPU."""
    found: list[Facts] = []
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            found.append({"index": int(match[1]), "errors": {}})
        elif (match := re.match(r"\s+Link \d+: (.+?):\s*(\d+)\s*$", line)) and found:
            counters = found[-1]["errors"]
            counters[match[1]] = counters.get(match[1], 0) + int(match[2])
    if text.strip() and not found:
        raise NotUnderstoodError(_smi_complaint(text))
    return {"moment": {"nvlink": found}}


def parse_driver_file(text: str) -> Facts:
    """/proc/driver/nvidia/version: the kernel module that is loaded."""
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    if match is None:
        raise NotUnderstoodError("no NVRM version in it")
    return {"driver": {"version": match[1], "module": match[1], "open_module": "Open Kernel Module" in text}}


def parse_nvcc(text: str) -> Facts:
    """`nvcc --version`: the toolkit's release."""
    match = re.search(r"release (\d+\.\d+), V(\d+\.\d+\.\d+)", text)
    if match is None:
        raise NotUnderstoodError("no release in it")
    return {"cuda": {"toolkit": match[1], "nvcc": match[2]}}


def parse_service(text: str) -> Facts:
    """`systemctl show` of the fabric manager."""
    values = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    if not text.strip():  # systemctl is installed, but systemd does not run (a container)
        raise AbsentError
    if "LoadState" not in values:
        raise NotUnderstoodError("no LoadState in it")
    if values["LoadState"] == "not-found":
        raise AbsentError
    return {"moment": {"fabric_manager": {"service": values.get("ActiveState")}}}


def parse_devices(text: str) -> Facts:
    """Device nodes of the driver."""
    names = [line.split("\t")[0].rsplit("/", 1)[-1] for line in text.splitlines() if line]
    return {"driver": {"device_nodes": sorted(names)}}


def parse_nvml(text: str) -> Facts:
    """What NVML says where there is no nvidia-smi, as in some containers."""
    return dict(json.loads(text))


def _ask_nvml() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        raise AbsentError from None
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(
                {
                    "index": index,
                    "name": _plain(pynvml.nvmlDeviceGetName(handle)),
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                }
            )
        version = _plain(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        raise AbsentError from None
    finally:
        pynvml.nvmlShutdown()
    return json.dumps({"driver": {"version": version}, "gpus": gpus})


def _plain(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


PROBES: tuple[Probe, ...] = (
    Probe("gpus", Command(("nvidia-smi", "-q", "-x")), parse_smi, _SMI_LIMIT_S),
    Probe("gpus-nvml", Ask("NVML", _ask_nvml), parse_nvml, _SMI_LIMIT_S),
    Probe("topology", Command(("nvidia-smi", "topo", "-m")), parse_topology, _SMI_LIMIT_S),
    Probe("nvlink", Command(("nvidia-smi", "nvlink", "-s")), parse_nvlink_status, _SMI_LIMIT_S),
    Probe("nvlink-errors", Command(("nvidia-smi", "nvlink", "-e")), parse_nvlink_errors, _SMI_LIMIT_S),
    Probe("driver", TextFile("/proc/driver/nvidia/version"), parse_driver_file),
    Probe("driver-devices", Tree(("/dev/nvidia*",)), parse_devices),
    Probe("cuda-toolkit", Command(("nvcc", "--version")), parse_nvcc),
    Probe(
        "fabric-manager",
        Command(
            ("systemctl", "show", "nvidia-fabricmanager", "-p", "LoadState,ActiveState,SubState"), accept=None
        ),
        parse_service,
    ),
)
