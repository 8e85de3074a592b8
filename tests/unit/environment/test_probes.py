# SPDX-License-Identifier: Apache-2.0
"""Parsers on kept outputs of real tools, whole and damaged, and how probes fail."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitbench.environment.probes import base, gpu, network, software, system
from splitbench.environment.probes.base import (
    AbsentError,
    Ask,
    Command,
    Facts,
    FailedError,
    NotUnderstoodError,
    Probe,
)

KEPT = Path(__file__).parents[2] / "fixtures" / "probe"


def kept(name: str) -> str:
    return (KEPT / name).read_text(encoding="utf-8")


# The forms of public reports (NVIDIA/nccl issue 1264, NVIDIA/k8s-test-infra issue 371), cut to two GPUs and one NIC.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t56-111,168-223\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
NVLINK = (
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
)
NVLINK_ERRORS = (
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)\n"
    "\t Link 0: Replay Errors: 2\n\t Link 0: Recovery Errors: 0\n"
    "\t Link 1: Replay Errors: 3\n\t Link 1: Recovery Errors: 0\n"
)
# Written after the source of ibv_devinfo: two ports, one of them down.
IBV = (
    "hca_id:\tmlx5_0\n\ttransport:\t\t\tInfiniBand (0)\n\tfw_ver:\t\t\t\t28.39.1002\n"
    "\tnode_guid:\t\t\t0000:0000:0000:0000\n\tboard_id:\t\t\tMT_0000000838\n\tphys_port_cnt:\t\t\t2\n"
    "\t\tport:\t1\n\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n\t\t\tactive_mtu:\t\t4096 (5)\n\t\t\tlink_layer:\t\tInfiniBand\n"
    "\t\tport:\t2\n\t\t\tstate:\t\t\tPORT_DOWN (1)\n\t\t\tactive_mtu:\t\t1024 (3)\n\t\t\tlink_layer:\t\tEthernet\n"
)
UCX_NEW = (
    "# Library version: 1.19.0\n# Library path: /usr/lib/libucs.so.0\n# API headers version: 1.19.0\n"
    "# Git branch '', revision e4bb802\n# Configured with: --enable-mt --with-cuda=/usr/local/cuda\n"
)


def test_os_release_and_memory_and_limits() -> None:
    assert system.parse_os_release(kept("debian12/os-release.txt"))["system"]["os_id"] == "debian"
    assert system.parse_os_release(kept("h200/os-release.txt"))["system"]["os"] == "Ubuntu 24.04.3 LTS"
    assert system.parse_meminfo(kept("h200/meminfo.txt"))["memory"]["total_bytes"] == 131961788 * 1024
    assert system.parse_limits(kept("h200/limits.txt"))["limits"]["open_files"] == 20000
    assert system.parse_limits(kept("h200/limits.txt"))["limits"]["locked_memory_bytes"] is None
    assert system.parse_limits(kept("debian12/limits.txt"))["limits"]["locked_memory_bytes"] == 8388608


def test_lscpu_of_two_machines() -> None:
    debian = system.parse_lscpu(kept("debian12/lscpu-J.txt"))["cpu"]
    assert debian["model"] == "AMD EPYC" and debian["logical"] == debian["physical"] == 2
    assert debian["numa"] == [{"node": 0, "cores": [0, 1]}] and debian["avx"] and not debian["avx512"]
    h200 = system.parse_lscpu(kept("h200/lscpu-J.txt"))["cpu"]
    assert h200["logical"] == 16 and h200["numa"] == [{"node": 0, "cores": list(range(16))}]


@pytest.mark.parametrize("language", ["de_DE", "fr_FR", "ja_JP"])
def test_lscpu_in_another_language_says_nothing_wrong(language: str) -> None:
    try:
        found = system.parse_lscpu(kept(f"debian12/lscpu-J.{language}.txt"))["cpu"]
    except NotUnderstoodError:
        return
    right = system.parse_lscpu(kept("debian12/lscpu-J.txt"))["cpu"]
    assert all(right[key] == value or value == [] for key, value in found.items())


def test_commands_are_asked_in_the_c_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("LANGUAGE", "de")
    assert system.parse_lscpu(Command(("lscpu", "-J")).read(5.0))["cpu"]["logical"] >= 1


def test_fields_of_lscpu_may_be_nested() -> None:
    text = json.dumps(
        {"lscpu": [{"field": "CPU(s):", "data": "4", "children": [{"field": "Model name:", "data": "X"}]}]}
    )
    assert system.parse_lscpu(text)["cpu"]["model"] == "X"


def test_clocks() -> None:
    assert (
        system.parse_chrony(kept("debian12/chronyc-tracking.txt"))["moment"]["clock"]["synchronised"] is False
    )
    with pytest.raises(NotUnderstoodError):
        system.parse_chrony(kept("debian12/chronyc-refused.txt"))
    shown = "Timezone=Etc/UTC\nLocalRTC=no\nCanNTP=yes\nNTP=yes\nNTPSynchronized=yes\nTimeUSec=Tue\n"
    assert system.parse_timedatectl(shown)["moment"]["clock"]["synchronised"] is True
    assert system.parse_adjtimex("0 8193 500")["moment"]["clock"] == {
        "synchronised": True,
        "estimated_error_us": 500,
    }
    assert system.parse_adjtimex("5 64 16000000")["moment"]["clock"]["synchronised"] is False


def test_variables_leave_secrets_out() -> None:
    found = system.recorded_variables(
        {
            "VLLM_API_KEY": "x",
            "VLLM_USE_V1": "1",
            "LMCACHE_REMOTE_URL": "redis://me:hush@there:1",
            "HOME": "/root",
            "NCCL_AUTH_TOKEN": "x",
            "PYTHONHASHSEED": "0",
        }
    )
    assert found == {
        "VLLM_USE_V1": "1",
        "LMCACHE_REMOTE_URL": "redis://<secret>@there:1",
        "PYTHONHASHSEED": "0",
    }


def test_smi_of_an_h200() -> None:
    facts = gpu.parse_smi(kept("h200/nvidia-smi-q-x.xml"))
    assert facts["driver"] == {"version": "580.159.04", "cuda": "13.0"}
    (card,) = facts["gpus"]
    assert card["name"] == "NVIDIA H200" and card["memory_bytes"] == 143771 * 2**20
    assert card["ecc"] is True and card["mig"] is False and card["compute_mode"] == "Default"
    assert card["power_limit_w"] == card["power_limit_default_w"] == 700 and card["max_clock_sm_mhz"] == 1980
    (now,) = facts["moment"]["gpus"]
    assert now["clocks_held_by"] == ["gpu_idle"] and now["processes"] == [] and now["memory_used_bytes"] == 0
    assert now["fabric"] is None


def test_smi_of_a_busy_gpu_under_an_older_driver() -> None:
    text = kept("h200/nvidia-smi-q-x.xml")
    text = text.replace("clocks_event_reason", "clocks_throttle_reason")
    text = text.replace("gpu_power_readings", "power_readings").replace(
        "current_power_limit", "enforced_power_limit"
    )
    process = (
        "<process_info><pid>77</pid><process_name>python</process_name>"
        "<used_memory>512 MiB</used_memory></process_info>"
    )
    text = text.replace("<processes>", f"<processes>{process}", 1)
    facts = gpu.parse_smi(text)
    assert facts["gpus"][0]["power_limit_w"] == 700
    assert facts["moment"]["gpus"][0]["clocks_held_by"] == ["gpu_idle"]
    assert facts["moment"]["gpus"][0]["processes"] == [
        {"pid": 77, "name": "python", "memory_bytes": 512 * 2**20}
    ]


def test_smi_that_cannot_reach_the_driver_says_so() -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    with pytest.raises(NotUnderstoodError, match="couldn't communicate"):
        gpu.parse_smi(said)
    with pytest.raises(NotUnderstoodError, match="couldn't communicate"):
        gpu.parse_nvlink_status(said)


def test_topology_becomes_a_matrix() -> None:
    one = gpu.parse_topology(kept("h200/nvidia-smi-topo-m.txt"))["topology"]
    assert one["links"] == {"GPU0": {}} and one["affinity"]["GPU0"] == {"cores": list(range(16)), "numa": [0]}
    two = gpu.parse_topology(TOPOLOGY)["topology"]
    assert two["links"]["GPU0"] == {"GPU1": "NV18", "NIC0": "PIX"} and two["links"]["NIC0"]["GPU1"] == "SYS"
    assert two["affinity"]["GPU1"]["numa"] == [1] and two["affinity"]["GPU1"]["cores"][-1] == 223
    assert two["nics"] == {"NIC0": "mlx5_0"}
    whole = kept("h200/session.txt")
    assert gpu.parse_topology(whole)["topology"]["links"] == {"GPU0": {}}


def test_nvlink() -> None:
    found = gpu.parse_nvlink_status(NVLINK)["nvlink"]
    assert found == [{"index": 0, "links_gb_s": [26.562, 0.0]}, {"index": 1, "links_gb_s": [26.562, 26.562]}]
    assert gpu.parse_nvlink_status("")["nvlink"] == []
    errors = gpu.parse_nvlink_errors(NVLINK_ERRORS)["moment"]["nvlink"]
    assert errors == [{"index": 0, "errors": {"Replay Errors": 5, "Recovery Errors": 0}}]


def test_driver_toolkit_and_fabric_manager() -> None:
    assert gpu.parse_driver_file(kept("h200/driver-version.txt"))["driver"]["version"] == "580.159.04"
    assert gpu.parse_nvcc(kept("h200/nvcc-version.txt"))["cuda"] == {"toolkit": "13.0", "nvcc": "13.0.88"}
    assert gpu.parse_nvcc(kept("h200/session.txt"))["cuda"]["nvcc"] == "13.0.88"
    running = "LoadState=loaded\nActiveState=active\nSubState=running\n"
    assert gpu.parse_service(running)["moment"]["fabric_manager"]["service"] == "active"
    with pytest.raises(AbsentError):
        gpu.parse_service("LoadState=not-found\nActiveState=inactive\nSubState=dead\n")


def test_systemctl_without_systemd_is_absent() -> None:
    with pytest.raises(AbsentError):
        gpu.parse_service("")


def test_what_a_tool_complains_about_can_be_its_answer() -> None:
    said = "Failed to get IB devices list: Function not implemented"
    command = Command(("sh", "-c", f"echo {said} >&2; exit 255"), accept=None, complaints=True)
    assert base.run_probe(Probe("x", command, network.parse_ibv)).facts == {"rdma": []}


def test_packages() -> None:
    found = network.parse_packages(kept("h200/dpkg.txt"))["packages"]
    assert found["cuda-nvcc-13-0"] == "13.0.88-1" and found["libucx0"] == "1.16.0+ds-5ubuntu1"
    assert "apt" not in found
    reference = "nvidia-fabricmanager-580\t580.95.05-1\ncuda-drivers-fabricmanager-580\t580.95.05-0ubuntu1\n"
    assert network.parse_packages(reference)["fabric_manager"]["package"] == "580.95.05-0ubuntu1"


def test_ucx_info_old_and_new() -> None:
    assert network.parse_ucx_info(kept("debian12/ucx_info-v.txt"))["ucx"] == {
        "system": "1.13.1",
        "revision": None,
        "with_cuda": False,
    }
    assert network.parse_ucx_info(UCX_NEW)["ucx"] == {
        "system": "1.19.0",
        "revision": "e4bb802",
        "with_cuda": True,
    }


def test_rdma_devices() -> None:
    (device,) = network.parse_ibv(IBV)["rdma"]
    assert device["name"] == "mlx5_0" and device["fw_ver"] == "28.39.1002"
    assert [port["state"] for port in device["ports"]] == ["PORT_ACTIVE", "PORT_DOWN"]
    assert "guid" not in json.dumps(device)
    assert network.parse_ibv(kept("debian12/ibv_devinfo.txt"))["rdma"] == []
    files = (
        "/sys/class/infiniband/mlx5_0/fw_ver\t28.39.1002\n"
        "/sys/class/infiniband/mlx5_0/ports/1/state\t4: ACTIVE\n"
        "/sys/class/infiniband/mlx5_0/ports/1/rate\t400 Gb/sec (4X NDR)\n"
    )
    (device,) = network.parse_infiniband(files)["rdma"]
    assert device["ports"] == [{"port": "1", "state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)"}]


def test_ofed_modules_and_direct_access() -> None:
    assert network.parse_ofed("MLNX_OFED_LINUX-24.10-1.1.4.0:\n")["ofed"]["version"] == "24.10-1.1.4.0"
    assert network.parse_ofed("OFED-internal-25.04-0.6.1:\n")["ofed"]["name"] == "OFED-internal-25.04-0.6.1"
    assert network.parse_modules(kept("h200/modules.txt"))["modules"] == ["nvidia", "nvidia_uvm"]
    files = (
        "/dev/gdrdrv\t\n/sys/module/gdrdrv/version\t2.4.4\n/sys/module/nvidia_peermem/version\t580.95.05\n"
    )
    assert network.parse_module_versions(files)["direct"] == {
        "gdrdrv_device": True,
        "gdrdrv": "2.4.4",
        "nvidia_peermem": "580.95.05",
    }


PARSERS: list[tuple[Callable[[str], Facts], str]] = [
    (system.parse_os_release, kept("debian12/os-release.txt")),
    (system.parse_lscpu, kept("debian12/lscpu-J.txt")),
    (system.parse_lscpu, kept("h200/lscpu-J.txt")),
    (system.parse_meminfo, kept("debian12/meminfo.txt")),
    (system.parse_limits, kept("debian12/limits.txt")),
    (system.parse_chrony, kept("debian12/chronyc-tracking.txt")),
    (gpu.parse_smi, kept("h200/nvidia-smi-q-x.xml")),
    (gpu.parse_topology, TOPOLOGY),
    (gpu.parse_topology, kept("h200/nvidia-smi-topo-m.txt")),
    (gpu.parse_nvlink_status, NVLINK),
    (gpu.parse_nvlink_errors, NVLINK_ERRORS),
    (gpu.parse_nvcc, kept("h200/nvcc-version.txt")),
    (gpu.parse_driver_file, kept("h200/driver-version.txt")),
    (network.parse_packages, kept("debian12/dpkg.txt")),
    (network.parse_ucx_info, kept("debian12/ucx_info-v.txt")),
    (network.parse_ibv, IBV),
    (network.parse_modules, kept("h200/modules.txt")),
    (software.parse_packages, json.dumps({"packages": {"vllm": "1"}, "torch": {}})),
]


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(range(len(PARSERS))), st.data())
def test_damaged_outputs_give_facts_or_a_reason(which: int, data: st.DataObject) -> None:
    parse, text = PARSERS[which]
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["cut", "line", "swap", "translate"]))
        at = data.draw(st.integers(0, len(text)))
        if kind == "cut":
            text = text[:at]
        elif kind == "line":
            text = text[:at] + text[text.find("\n", at) + 1 :]
        elif kind == "swap":
            text = text[:at] + data.draw(st.text(max_size=8)) + text[at + data.draw(st.integers(0, 8)) :]
        else:
            text = re.sub(r"[A-Z]", data.draw(st.sampled_from("ÄЖ機")), text, count=at % 50)
    try:
        json.dumps(parse(text))
    except (AbsentError, FailedError) as error:
        assert "\n" not in str(error)


def test_a_missing_tool_is_absent_and_a_missing_file_too() -> None:
    assert base.run_probe(Probe("x", Command(("no-such-tool",)), gpu.parse_smi)).status == "absent"
    assert base.run_probe(Probe("x", base.TextFile("/no/such/file"), gpu.parse_smi)).status == "absent"
    assert base.run_probe(Probe("x", base.Tree(("/no/such/*",)), network.parse_network)).status == "absent"


def test_a_failing_tool_says_why_in_one_line() -> None:
    probe = Probe("x", Command(("sh", "-c", "echo one; echo two >&2; exit 3")), gpu.parse_smi)
    assert base.run_probe(probe).status == "failed: exit code 3, two"


def test_a_parser_that_trips_is_an_outcome() -> None:
    def trips(text: str) -> Facts:
        return {"a": text[99]}

    assert (
        base.run_probe(Probe("x", Ask("t", lambda: "t"), trips)).status
        == "failed: not understood (IndexError)"
    )


def test_slow_tools_are_ended_with_their_children_and_hold_up_nobody() -> None:
    slow = [
        Probe(f"s{n}", Command(("sh", "-c", "sleep 60 & wait")), gpu.parse_smi, limit_s=0.3) for n in range(4)
    ]
    hangs = Probe("hangs", Ask("a driver", lambda: str(time.sleep(30))), gpu.parse_smi, limit_s=0.3)
    began = time.monotonic()
    outcomes = base.run_probes([*slow, hangs, Probe("good", Ask("t", lambda: "0-2,5"), lambda t: {"n": t})])
    assert time.monotonic() - began < 5
    assert [outcome.status for outcome in outcomes] == ["failed: no answer in 0.3 s"] * 5 + ["ok"]
    assert outcomes[-1].facts == {"n": "0-2,5"}


def test_earlier_probes_have_the_first_word() -> None:
    facts: Facts = {"cpu": {"model": "from lscpu", "numa": None}}
    base.merge(facts, {"cpu": {"model": "from a file", "numa": [1]}, "gpus": []})
    assert facts == {"cpu": {"model": "from lscpu", "numa": [1]}, "gpus": []}
