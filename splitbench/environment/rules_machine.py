# SPDX-License-Identifier: Apache-2.0
"""Rules about the machine: GPUs and their links, memory, limits, ports, and who else is on it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from splitbench.environment import versions
from splitbench.environment.needs import GIB, Needs
from splitbench.environment.rules import Facts, Rule

Found = Iterator[tuple[str, str]]

_MIB = 2**20
# A driver holds some memory on every GPU; a process of somebody holds more.
_IDLE_BYTES = 1024 * _MIB


def gpu_count(facts: Facts, needs: Needs) -> Found:
    """Layouts name GPUs that are not there."""
    if needs.kind != "gpus" or facts.driver is None:
        return
    present = {int(gpu["index"]) for gpu in facts.gpus}
    missing = sorted(set(needs.devices) - present)
    if missing:
        layouts = sorted(
            name
            for name, engines in needs.layouts.items()
            if any(set(engine.devices) & set(missing) for engine in engines)
        )
        yield (
            f"layouts {', '.join(layouts)} name GPU {', '.join(map(str, missing))}; here are {len(present)}",
            "name GPUs that are there, or leave these layouts out",
        )


def cores(facts: Facts, needs: Needs) -> Found:
    """Layouts name cores that this process may not use."""
    usable = set((facts.machine.get("cpu") or {}).get("cores_usable") or [])
    missing = sorted(set(needs.devices) - usable)
    if needs.kind == "cores" and usable and missing:
        yield (
            f"layouts name core {', '.join(map(str, missing))}; usable here are {_ranges(usable)}",
            "name cores that are there",
        )


def gpus_differ(facts: Facts, needs: Needs) -> Found:
    """GPUs that arms are compared on must be alike."""
    used = [gpu for gpu in facts.gpus if gpu["index"] in needs.devices]
    for key, what in (
        ("name", "models"),
        ("memory_bytes", "sizes of memory"),
        ("power_limit_w", "power limits"),
        ("ecc", "ECC modes"),
    ):
        values = {gpu.get(key) for gpu in used if gpu.get(key) is not None}
        if needs.kind == "gpus" and len(values) > 1:
            yield (
                f"the GPUs have different {what}: {', '.join(map(str, sorted(values, key=str)))}",
                "use equal GPUs, set equally",
            )


def power_limit(facts: Facts, needs: Needs) -> Found:
    """A GPU below its usual power limit is slower than its name promises."""
    for gpu in facts.gpus:
        limit, usual = gpu.get("power_limit_w"), gpu.get("power_limit_default_w")
        if needs.kind == "gpus" and gpu["index"] in needs.devices and limit and usual and limit < usual:
            yield (
                f"GPU {gpu['index']} is held to {limit} W of {usual} W",
                f"`nvidia-smi -i {gpu['index']} -pl {usual}`, or say so beside the results",
            )


def mig(facts: Facts, needs: Needs) -> Found:
    """A GPU in MIG mode is not one GPU."""
    for gpu in facts.gpus:
        if needs.kind == "gpus" and gpu["index"] in needs.devices and gpu.get("mig"):
            yield (
                f"GPU {gpu['index']} is in MIG mode",
                f"`nvidia-smi -i {gpu['index']} -mig 0`, or use another GPU",
            )


def compute_mode(facts: Facts, needs: Needs) -> Found:
    """A GPU that lets no process in, or only one where two engines share it."""
    shared: set[int] = set()
    for engines in needs.layouts.values():
        devices = [device for engine in engines for device in engine.devices]
        shared |= {device for device in devices if devices.count(device) > 1}
    for gpu in facts.gpus:
        mode, index = str(gpu.get("compute_mode") or "Default"), gpu["index"]
        alone = mode.startswith("Exclusive") and index in shared
        if needs.kind == "gpus" and index in needs.devices and (mode == "Prohibited" or alone):
            yield f"GPU {index} has compute mode {mode}", f"`nvidia-smi -i {index} -c DEFAULT`"


def gpu_idle(facts: Facts, needs: Needs) -> Found:
    """Somebody else computes on a GPU of this experiment."""
    if needs.session_up or needs.kind != "gpus":
        return
    for gpu in facts.moment.get("gpus") or []:
        if gpu["index"] not in needs.devices:
            continue
        count, used = len(gpu.get("processes") or []), gpu.get("memory_used_bytes") or 0
        if count or used > _IDLE_BYTES:
            yield (
                f"GPU {gpu['index']} is in use: {count} processes, {used / GIB:.1f} GiB",
                "wait until it is idle, or name another GPU",
            )


def gpu_held_back(facts: Facts, needs: Needs) -> Found:
    """A GPU slows down for heat or for a lack of power."""
    for gpu in facts.moment.get("gpus") or []:
        reasons = [
            reason for reason in gpu.get("clocks_held_by") or [] if re.search(r"slowdown|brake", reason)
        ]
        if needs.kind == "gpus" and gpu["index"] in needs.devices and reasons:
            yield f"GPU {gpu['index']} is slowed down: {', '.join(reasons)}", "mend cooling or power first"


def fabric_manager(facts: Facts, needs: Needs) -> Found:
    """GPUs behind NVSwitch work only with a running fabric manager of the driver's very version."""
    if needs.kind != "gpus" or not _behind_switch(facts):
        return
    package = (facts.machine.get("fabric_manager") or {}).get("package")
    if package and facts.driver and versions.key(package) != versions.key(facts.driver):
        yield (
            f"fabric manager {package} beside driver {facts.driver}; they must be of one version",
            f"install the fabric manager of {facts.driver}",
        )
    service = (facts.moment.get("fabric_manager") or {}).get("service")
    if service not in (None, "active"):
        yield f"the fabric manager is {service}", "`systemctl start nvidia-fabricmanager`"
    for gpu in facts.moment.get("gpus") or []:
        state = gpu.get("fabric")
        if gpu["index"] in needs.devices and state is not None and state != "Completed":
            yield (
                f"GPU {gpu['index']} has not joined the fabric ({state})",
                "look at the fabric manager's log",
            )


def _behind_switch(facts: Facts) -> bool:
    """Every pair of at least four GPUs has as many links as any other: that is a switch."""
    links = (facts.machine.get("topology") or {}).get("links") or {}
    gpus = [name for name in links if name.startswith("GPU")]
    kinds = {links[one].get(other) for one in gpus for other in gpus if one != other}
    return len(gpus) >= 4 and len(kinds) == 1 and str(next(iter(kinds))).startswith("NV")


def nvlink(facts: Facts, needs: Needs) -> Found:
    """GPUs of one layout that reach each other only over PCIe, or an NVLink that is down."""
    links = (facts.machine.get("topology") or {}).get("links") or {}
    for name, engines in needs.layouts.items():
        devices = sorted({device for engine in engines for device in engine.devices})
        slow = [
            f"{one}-{other} ({how})"
            for one in devices
            for other in devices
            if one < other
            and (how := (links.get(f"GPU{one}") or {}).get(f"GPU{other}"))
            and not how.startswith("NV")
        ]
        if needs.kind == "gpus" and slow:
            yield (
                f"in {name}, GPUs have no NVLink between them: {', '.join(slow[:4])}",
                "name GPUs that are linked",
            )
    found = facts.machine.get("nvlink") or []
    linked = any(speed for gpu in found for speed in gpu["links_gb_s"])
    for gpu in found:
        down, count = sum(speed == 0 for speed in gpu["links_gb_s"]), len(gpu["links_gb_s"])
        if needs.kind != "gpus" or gpu["index"] not in needs.devices:
            continue
        if 0 < down < count:
            yield f"GPU {gpu['index']} has {down} of {count} NVLinks down", "reset or repair it"
        elif linked and down == count:  # none is listed where all are down
            yield f"GPU {gpu['index']} has no NVLink that is up, others have", "reset or repair it"


def hash_seed(facts: Facts, needs: Needs) -> Found:
    """LMCache names chunks by Python's hash: prefill and decode must share its seed."""
    for name, engines in needs.layouts.items():
        seeds = {engine.env.get("PYTHONHASHSEED", "random") for engine in engines if engine.lmcache}
        if len(seeds) > 1 or seeds & {"random"}:
            yield (
                f"engines of {name} have hash seeds {', '.join(sorted(seeds))}: they name chunks differently",
                'set engine.env PYTHONHASHSEED: "0"',
            )


def host_memory(facts: Facts, needs: Needs) -> Found:
    """Every rank sets its buffer aside in host memory at the start."""
    total = (facts.machine.get("memory") or {}).get("total_bytes")
    for name, engines in needs.layouts.items():
        wanted = sum(engine.host_bytes for engine in engines)
        if total and wanted > total:
            yield (
                f"the buffers of {name} need {wanted / GIB:.0f} GiB of host memory, here are {total / GIB:.0f}",
                "make the buffers smaller, or use fewer ranks",
            )


def shared_memory(facts: Facts, needs: Needs) -> Found:
    """Ranks of one engine talk over /dev/shm; containers often have 64 MiB of it."""
    total = (facts.machine.get("memory") or {}).get("shm_total_bytes")
    several = [engine for engine in needs.engines if needs.kind == "gpus" and len(engine.devices) > 1]
    if total is not None and several and total < GIB:
        yield f"/dev/shm has {total / _MIB:.0f} MiB", "start the container with --ipc=host or --shm-size=16g"


def locked_memory(facts: Facts, needs: Needs) -> Found:
    """RDMA registers memory, which counts against the limit on locked memory."""
    limit = (facts.machine.get("limits") or {}).get("locked_memory_bytes")
    active = [
        device["name"]
        for device in facts.machine.get("rdma") or []
        if any(str(port.get("state", "")).endswith("ACTIVE") for port in device.get("ports", []))
    ]
    if needs.by_nixl and active and limit is not None and limit < GIB:
        yield (
            f"locked memory is limited to {limit / _MIB:.0f} MiB, and UCX will register buffers with {active[0]}",
            "`ulimit -l unlimited`",
        )


def cpu_without_avx(facts: Facts, needs: Needs) -> Found:
    """The UCX in NIXL's wheels ends the process on a processor without AVX."""
    if needs.by_nixl and facts.software.get("ucx") and (facts.machine.get("cpu") or {}).get("avx") is False:
        yield (
            "this processor has no AVX, which the UCX in NIXL's wheels needs",
            "give the virtual machine AVX",
        )


def ports_free(facts: Facts, needs: Needs) -> Found:
    """Somebody else listens on a port of a layout."""
    taken = sorted(set(needs.ports) & set(facts.moment.get("listening") or []))
    if taken and not needs.session_up:
        yield (
            f"somebody listens on port {', '.join(map(str, taken[:6]))} already",
            "end that program, or set node.base_port to a free range",
        )


def clocksource(facts: Facts, needs: Needs) -> Found:
    """A clock that is slow to read costs every time stamp, thousands a second in a client."""
    name = (facts.machine.get("system") or {}).get("clocksource")
    if name in ("hpet", "acpi_pm", "jiffies"):
        yield f"the kernel counts time with {name}", "boot with clocksource=tsc"


def _ranges(values: set[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for value in sorted(values):
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


_SMI = "https://docs.nvidia.com/deploy/nvidia-smi/"
_FABRIC = "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/"

RULES: tuple[Rule, ...] = (
    Rule("gpu-count", "error", _SMI, gpu_count),
    Rule("cores", "error", "https://man7.org/linux/man-pages/man2/sched_setaffinity.2.html", cores),
    Rule("gpus-differ", "warn", _SMI, gpus_differ),
    Rule("power-limit", "warn", _SMI, power_limit),
    Rule("mig", "error", "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/", mig),
    Rule("compute-mode", "error", _SMI, compute_mode),
    Rule("gpu-idle", "error", _SMI, gpu_idle),
    Rule("gpu-held-back", "warn", _SMI, gpu_held_back),
    Rule("fabric-manager", "error", _FABRIC, fabric_manager),
    Rule("nvlink", "warn", _SMI, nvlink),
    Rule("hash-seed", "error", "https://github.com/LMCache/LMCache/issues/1139", hash_seed),
    Rule("host-memory", "error", "https://docs.lmcache.ai/api_reference/configurations.html", host_memory),
    Rule("shared-memory", "error", "https://docs.vllm.ai/en/latest/deployment/docker/", shared_memory),
    Rule("locked-memory", "warn", "https://openucx.readthedocs.io/en/master/faq.html", locked_memory),
    Rule("cpu-without-avx", "error", "https://github.com/ai-dynamo/nixl/issues/2119", cpu_without_avx),
    Rule("ports-free", "error", "https://docs.vllm.ai/en/latest/features/nixl_connector_usage/", ports_free),
    Rule(
        "clocksource",
        "warn",
        "https://www.kernel.org/doc/html/latest/virt/kvm/x86/timekeeping.html",
        clocksource,
    ),
)
