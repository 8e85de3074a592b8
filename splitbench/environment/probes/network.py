# SPDX-License-Identifier: Apache-2.0
"""Probes of network cards, RDMA, UCX and the kernel modules that let NICs reach GPU memory."""

from __future__ import annotations

import re
from contextlib import suppress

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

# Distribution packages that serving depends on; the rest of a system is left out of the record.
RECORDED_PACKAGES = re.compile(
    r"^(nvidia-|libnvidia-|cuda-|libcuda|libcudnn|libnccl|nccl|ucx|libucx|doca-|mlnx-|ofed-|rdma-core|ibverbs-"
    r"|libibverbs|gdrcopy|libgdrapi|kmod-nvidia|datacenter-gpu-manager)"
)
_MODULES = (
    "nvidia",
    "nvidia_uvm",
    "nvidia_peermem",
    "nvidia_fs",
    "gdrdrv",
    "mlx5_core",
    "mlx5_ib",
    "ib_core",
    "xpmem",
)


def parse_packages(text: str) -> Facts:
    """Lines of `name<TAB>version` of a package manager; only those that serving depends on are kept."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, version = line.partition("\t")
        name = name.split(":", 1)[0]
        if version.strip() and RECORDED_PACKAGES.match(name):
            found[name] = version.strip()
    if "\t" not in text:
        raise NotUnderstoodError("no line of a name and a version")
    fabric = next((version for name, version in sorted(found.items()) if _is_fabric_manager(name)), None)
    facts: Facts = {"packages": found}
    if fabric:
        facts["fabric_manager"] = {"package": fabric}
    return facts


def _is_fabric_manager(name: str) -> bool:
    return bool(re.fullmatch(r"(cuda-drivers|nvidia)-fabric-?manager(-\d+)?", name))


def parse_ucx_info(text: str) -> Facts:
    """`ucx_info -v`: the version of the system's UCX and whether it was built with CUDA."""
    # Up to 1.9 the line is "# UCT version=1.6.0 revision f8b9db6".
    match = re.search(r"^# (?:Library v|V|UCT v)ersion[:=]? ?(\d+\.\d+\.\d+)", text, re.MULTILINE)
    if match is None:
        raise NotUnderstoodError("no version in it")
    revision = re.search(r"revision ([0-9a-f]{7,40})", text)
    configured = re.search(r"^# [Cc]onfigured with: (.*)$", text, re.MULTILINE)
    return {
        "ucx": {
            "system": match[1],
            "revision": revision[1] if revision and set(revision[1]) != {"0"} else None,
            "with_cuda": "--with-cuda" in configured[1] if configured else None,
        }
    }


def parse_ibv(text: str) -> Facts:
    """`ibv_devinfo`: RDMA devices with firmware and the state of their ports."""
    devices: list[Facts] = []
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "hca_id":
            devices.append({"name": value, "ports": []})
        elif devices and key in ("fw_ver", "transport", "board_id"):
            devices[-1][key] = value
        elif devices and key == "port":
            devices[-1]["ports"].append({"port": value})
        elif devices and devices[-1]["ports"] and key in ("state", "active_mtu", "link_layer"):
            devices[-1]["ports"][-1][key] = re.sub(r"\s*\(\d+\)$", "", value)
    if not devices:
        if re.search(r"No IB devices found|IB devices list", text):
            return {"rdma": []}
        raise NotUnderstoodError("no hca_id in it")
    return {"rdma": devices}


def parse_infiniband(text: str) -> Facts:
    """Files of /sys/class/infiniband: the same devices where ibv_devinfo is not installed."""
    devices: dict[str, Facts] = {}
    for line in text.splitlines():
        path, _, value = line.partition("\t")
        parts = path.split("/")[4:]
        if len(parts) < 2:
            continue
        device = devices.setdefault(parts[0], {"name": parts[0], "ports": []})
        if parts[1] == "fw_ver":
            device["fw_ver"] = value
        elif parts[1] == "ports" and len(parts) == 4:
            if not device["ports"] or device["ports"][-1]["port"] != parts[2]:
                device["ports"].append({"port": parts[2]})
            device["ports"][-1][parts[3]] = re.sub(r"^\d+: ", "", value)
    return {"rdma": list(devices.values())}


def parse_network(text: str) -> Facts:
    """Files of /sys/class/net: interfaces with speed (Mbit/s), state and driver; no addresses."""
    found: dict[str, Facts] = {}
    for line in text.splitlines():
        path, _, value = line.partition("\t")
        parts = path.split("/")[4:]
        if len(parts) < 2 or parts[0] == "lo":
            continue
        interface = found.setdefault(parts[0], {"name": parts[0]})
        if parts[1] == "speed" and value.isdecimal():
            interface["speed_mbit_s"] = int(value)
        elif parts[1] == "operstate":
            interface["state"] = value
        elif parts[-1] == "uevent" and value.startswith("DRIVER="):
            interface["driver"] = value.removeprefix("DRIVER=")
    return {"nics": list(found.values())}


def parse_ofed(text: str) -> Facts:
    """`ofed_info -s`: the version of DOCA-OFED or MLNX_OFED."""
    match = re.search(
        r"^\s*((?:OFED-internal|MLNX_OFED_LINUX|DOCA|OFED)[\w.-]*?)-?:?\s*$", text, re.MULTILINE
    )
    version = re.search(r"\d+\.\d+-[\d.]+", text)
    if match is None or version is None:
        raise NotUnderstoodError("no version in it")
    return {"ofed": {"name": match[1], "version": version[0]}}


def parse_modules(text: str) -> Facts:
    """/proc/modules: those that let devices reach each other's memory."""
    loaded = {line.split(" ", 1)[0] for line in text.splitlines()}
    if text.strip() and not any(len(line.split()) >= 6 for line in text.splitlines()):
        raise NotUnderstoodError("not the form of /proc/modules")
    return {"modules": sorted(loaded & set(_MODULES))}


def parse_module_versions(text: str) -> Facts:
    """/sys/module/*/version and /dev/gdrdrv: GDRCopy, peer memory, GPUDirect Storage."""
    found: Facts = {}
    for line in text.splitlines():
        path, _, value = line.partition("\t")
        if path.startswith("/sys/module/"):
            found[path.split("/")[3]] = value
        elif path == "/dev/gdrdrv":
            found["gdrdrv_device"] = True
    return {"direct": found}


def parse_listening(text: str) -> Facts:
    """/proc/net/tcp and tcp6: ports that somebody listens on."""
    ports = {
        int(match[1], 16)
        for match in re.finditer(
            r"^\s*\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} 0A ", text, re.MULTILINE
        )
    }
    if "local_address" not in text:
        raise NotUnderstoodError("not the form of /proc/net/tcp")
    return {"moment": {"listening": sorted(ports)}}


def _ask_listening() -> str:
    texts = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(AbsentError):
            texts.append(TextFile(table).read(1.0))
    return "\n".join(texts)


PROBES: tuple[Probe, ...] = (
    Probe("listening", Ask("/proc/net/tcp /proc/net/tcp6", _ask_listening), parse_listening),
    Probe("packages-dpkg", Command(("dpkg-query", "-W", "-f", "${Package}\\t${Version}\\n")), parse_packages),
    Probe(
        "packages-rpm", Command(("rpm", "-qa", "--qf", "%{NAME}\\t%{VERSION}-%{RELEASE}\\n")), parse_packages
    ),
    Probe("ucx", Command(("ucx_info", "-v")), parse_ucx_info),
    Probe("rdma", Command(("ibv_devinfo",), accept=None, complaints=True), parse_ibv),
    Probe(
        "rdma-files",
        Tree(
            (
                "/sys/class/infiniband/*/fw_ver",
                "/sys/class/infiniband/*/ports/*/state",
                "/sys/class/infiniband/*/ports/*/rate",
                "/sys/class/infiniband/*/ports/*/link_layer",
            )
        ),
        parse_infiniband,
    ),
    Probe(
        "network",
        Tree(("/sys/class/net/*/operstate", "/sys/class/net/*/speed", "/sys/class/net/*/device/uevent")),
        parse_network,
    ),
    Probe("ofed", Command(("ofed_info", "-s")), parse_ofed),
    Probe("modules", TextFile("/proc/modules"), parse_modules),
    Probe(
        "direct",
        Tree(
            (
                "/dev/gdrdrv",
                "/sys/module/gdrdrv/version",
                "/sys/module/nvidia_peermem/version",
                "/sys/module/nvidia_fs/version",
            )
        ),
        parse_module_versions,
    ),
)
