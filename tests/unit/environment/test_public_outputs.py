# SPDX-License-Identifier: Apache-2.0
"""Parsers on what machines with NVSwitch, NICs and RDMA print, after public reports on GitHub: each case names its own.

The forms and the facts are the reports'; the text is made here, with the tabs that the tools write.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from splitbench.environment.probes import gpu, network
from splitbench.environment.probes.base import Facts, NotUnderstoodError, merge
from splitbench.environment.rules import findings
from tests.unit.environment.environments import eight_gpu_needs, eight_gpus


def matrix(
    between: str, nics: Sequence[Sequence[int]], cpus: Sequence[tuple[int, str, str]], *, numa_id: bool = True
) -> str:
    """`nvidia-smi topo -m` of eight GPUs: their nearest NICs, and from which GPU on which cores and node are near."""
    names = [f"GPU{index}" for index in range(8)]
    cards = [f"NIC{index}" for index in range(1 + max((n for near in nics for n in near), default=-1))]
    heads = [*names, *cards, "CPU Affinity", "NUMA Affinity", *(["GPU NUMA ID"] if numa_id else [])]
    lines = ["\t\x1b[4m" + "\t".join(heads) + "\x1b[0m"]
    for index, name in enumerate(names):
        row = [" X " if other == name else between for other in names]
        row += ["PIX" if card in nics[index] else "SYS" for card in range(len(cards))]
        _, cores, node = [place for place in cpus if place[0] <= index][-1]
        lines.append("\t".join([name, *row, cores, node, *(["", "N/A"] if numa_id else [])]))
    for card, name in enumerate(cards):
        row = ["PIX" if card in nics[index] else "SYS" for index in range(8)]
        row += [" X " if other == name else "SYS" for other in cards]
        lines.append("\t".join([name, *row, *([""] * 3)]))
    legend = (
        "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    )
    if cards:
        legend += "\nNIC Legend:\n\n" + "".join(f"  {name}: mlx5_{n}\n" for n, name in enumerate(cards))
    return "\n".join(lines) + "\n" + legend


TWO_NODES = [(0, "0-55,112-167", "0"), (4, "56-111,168-223", "1")]


def test_h100_with_ten_nics() -> None:  # vllm-project/vllm/issues/29944
    text = matrix("NV18", [[3], [2], [1], [0], [5], [4], [7], [6, 8, 9]], TWO_NODES)
    found = gpu.parse_topology(text)["topology"]
    assert len(found["links"]) == 18 and len(found["nics"]) == 10
    assert {how for other, how in found["links"]["GPU0"].items() if other.startswith("GPU")} == {"NV18"}
    assert found["links"]["GPU0"]["NIC3"] == found["links"]["NIC3"]["GPU0"] == "PIX"
    assert found["affinity"]["GPU7"]["numa"] == [1] and len(found["affinity"]["GPU7"]["cores"]) == 112
    assert "NIC0" not in found["affinity"]


def test_four_numa_nodes() -> None:  # sgl-project/sglang/issues/13973
    places = [
        (0, "0-23,96-119", "0"),
        (3, "24-47,120-143", "1"),
        (4, "48-71,144-167", "2"),
        (7, "72-95", "3"),
    ]
    nics = [[0], [1], [2], [4], [5], [6], [7], [8]]
    found = gpu.parse_topology(matrix("NV18", nics, places))["topology"]
    assert [found["affinity"][f"GPU{index}"]["numa"] for index in range(8)] == [
        *([[0]] * 3), [1], *([[2]] * 3), [3],
    ]  # fmt: skip


def test_an_older_driver_has_no_gpu_numa_id() -> None:  # NVIDIA/nccl/issues/933
    found = gpu.parse_topology(
        matrix("NV8", [[2], [4], [6], [8], [1], [3], [5], [7]], TWO_NODES, numa_id=False)
    )
    assert found["topology"]["links"]["GPU0"]["GPU7"] == "NV8"
    assert found["topology"]["affinity"]["GPU4"]["cores"][0] == 56


def test_eight_gpus_without_nvlink_are_called_out() -> None:  # deepseek-ai/DeepEP/issues/128
    record = eight_gpus()
    record["machine"]["topology"] = gpu.parse_topology(matrix("SYS", [[n] for n in range(8)], TWO_NODES))[
        "topology"
    ]
    found = [finding for finding in findings(record, eight_gpu_needs()) if finding.rule == "nvlink"]
    assert len(found) == 2 and "0-1 (SYS)" in found[0].message


@pytest.mark.parametrize(
    ("name", "speed", "links", "indent"),
    [
        ("NVIDIA H100 80GB HBM3", "26.562", 18, "\t "),  # NVIDIA/nccl/issues/1264
        ("NVIDIA A100-SXM4-80GB", "25", 12, "\t "),  # NVIDIA/nccl-tests/issues/228
        ("NVIDIA GB200", "53.125", 18, "         "),  # NVIDIA/k8s-test-infra/issues/371
    ],
)
def test_nvlink_speeds(name: str, speed: str, links: int, indent: str) -> None:
    text = "".join(
        f"GPU {n}: {name} (UUID: GPU-{n})\n"
        + "".join(f"{indent}Link {k}: {speed} GB/s\n" for k in range(links))
        for n in range(4)
    )
    found = gpu.parse_nvlink_status(text)["nvlink"]
    assert [gpu["index"] for gpu in found] == [0, 1, 2, 3]
    assert all(gpu["links_gb_s"] == [float(speed)] * links for gpu in found)


def test_links_that_are_down() -> None:
    # Azure/azhpc-diagnostics/issues/73: two of six; NVIDIA/open-gpu-kernel-modules/issues/1150: all of one GPU.
    some = "GPU 0: Tesla V100-SXM2-32GB (UUID: GPU-0)\n" + "".join(
        f"         Link {k}: {'<inactive>' if k in (3, 5) else '25.781 GB/s'}\n" for k in range(6)
    )
    none = (
        "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n"
        "NVML: Unable to retrieve NVLink information as all links are inActive\n"
    )
    found = gpu.parse_nvlink_status(some + none)["nvlink"]
    assert [speed > 0 for speed in found[0]["links_gb_s"]] == [True, True, True, False, True, False]
    assert found[1] == {"index": 1, "links_gb_s": []}
    record = eight_gpus()
    record["machine"]["nvlink"] = found
    says = [finding.message for finding in findings(record, eight_gpu_needs()) if finding.rule == "nvlink"]
    assert says == ["GPU 0 has 2 of 6 NVLinks down", "GPU 1 has no NVLink that is up, others have"]


def test_nvlink_errors_of_a_newer_driver() -> None:  # NVIDIA/srt-slurm/pull/307
    text = "GPU 0: NVIDIA GB300\n" + "".join(
        f"\t Link {k}: Replay Errors: 0\n\t Link {k}: Recovery Errors: {k}\n\t Link {k}: CRC Errors: 0\n"
        for k in range(3)
    )
    (only,) = gpu.parse_nvlink_errors(text)["moment"]["nvlink"]
    assert only["errors"] == {"Replay Errors": 0, "Recovery Errors": 3, "CRC Errors": 0}


def ibv(name: str, firmware: str, board: str, layer: str, state: str = "PORT_ACTIVE (4)") -> str:
    return (
        f"hca_id:\t{name}\n\ttransport:\t\t\tInfiniBand (0)\n\tfw_ver:\t\t\t\t{firmware}\n"
        "\tnode_guid:\t\t\t0000:0000:0000:0000\n\tsys_image_guid:\t\t\t0000:0000:0000:0000\n"
        f"\tvendor_id:\t\t\t0x02c9\n\tvendor_part_id:\t\t\t4129\n\thw_ver:\t\t\t\t0x0\n\tboard_id:\t\t\t{board}\n"
        f"\tphys_port_cnt:\t\t\t1\n\t\tport:\t1\n\t\t\tstate:\t\t\t{state}\n\t\t\tmax_mtu:\t\t4096 (5)\n"
        f"\t\t\tactive_mtu:\t\t4096 (5)\n\t\t\tsm_lid:\t\t\t0\n\t\t\tlink_layer:\t\t{layer}\n\n"
    )


def test_rdma_of_ethernet_and_infiniband() -> None:  # deepseek-ai/DeepEP/issues/38 and /55
    text = (
        ibv("mlx5_2", "28.42.1000", "MT_0000000838", "Ethernet")
        + ibv("mlx5_3", "16.35.4030", "MT_0000000008", "Ethernet", "PORT_DOWN (1)")
        + ibv("mlx5_4", "28.37.1700", "MT_0000000970", "InfiniBand")
    )
    found = network.parse_ibv(text)["rdma"]
    assert [(device["name"], device["fw_ver"], device["board_id"]) for device in found] == [
        ("mlx5_2", "28.42.1000", "MT_0000000838"),
        ("mlx5_3", "16.35.4030", "MT_0000000008"),
        ("mlx5_4", "28.37.1700", "MT_0000000970"),
    ]
    assert [port for device in found for port in device["ports"]] == [
        {"port": "1", "state": "PORT_ACTIVE", "active_mtu": "4096", "link_layer": "Ethernet"},
        {"port": "1", "state": "PORT_DOWN", "active_mtu": "4096", "link_layer": "Ethernet"},
        {"port": "1", "state": "PORT_ACTIVE", "active_mtu": "4096", "link_layer": "InfiniBand"},
    ]


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("MLNX_OFED_LINUX-24.04-0.6.6.0:\n", "24.04-0.6.6.0"),  # openucx/ucx/issues/9950
        ("OFED-internal-25.04-0.6.1:\n", "25.04-0.6.1"),
        ("OFED-internal-25.10-1.2.8.0.700:\n", "25.10-1.2.8.0.700"),  # Mellanox/network-operator/pull/1901
        ("MLNX_OFED_LINUX-4.7-3.2.9.0:\n", "4.7-3.2.9.0"),  # NVIDIA/hpc-container-maker/pull/255
    ],
)
def test_ofed(said: str, version: str) -> None:
    found = network.parse_ofed(said)["ofed"]
    assert found["version"] == version and found["name"] == said.strip().removesuffix(":")


def test_ucx_of_the_system_by_age() -> None:
    old = "# UCT version=1.6.0 revision f8b9db6\n# configured with: --prefix=/usr --enable-mt --with-cuda\n"
    assert network.parse_ucx_info(old)["ucx"] == {  # openucx/ucx/issues/4929
        "system": "1.6.0",
        "revision": "f8b9db6",
        "with_cuda": True,
    }
    new = (
        "# Library version: 1.17.0\n# Library path: /usr/lib64/libucs.so.0\n# API headers version: 1.17.0\n"
        "# Git branch '', revision 7bb2722\n# Configured with: --prefix=/usr --without-go --with-cuda --with-gdrcopy\n"
    )
    assert network.parse_ucx_info(new)["ucx"] == {  # openucx/ucx/issues/9950
        "system": "1.17.0",
        "revision": "7bb2722",
        "with_cuda": True,
    }


@pytest.mark.parametrize(
    ("active", "sub", "complains"),
    # bottlerocket-os/bottlerocket-kernel-kit/pull/142; NVIDIA/gpu-operator/issues/610: the process ended with 1.
    [("active", "running", False), ("failed", "failed", True), ("activating", "auto-restart", True)],
)
def test_fabric_manager_s_service(active: str, sub: str, complains: bool) -> None:
    shown = f"LoadState=loaded\nActiveState={active}\nSubState={sub}\n"
    record = eight_gpus()
    record["moment"].pop("fabric_manager")
    merge(record["moment"], gpu.parse_service(shown)["moment"])
    found = [finding for finding in findings(record, eight_gpu_needs()) if finding.rule == "fabric-manager"]
    assert bool(found) is complains
    # A masked unit is there and will not start.
    masked: Facts = gpu.parse_service("LoadState=masked\nActiveState=inactive\nSubState=dead\n")
    assert masked["moment"]["fabric_manager"]["service"] == "inactive"


def test_gpus_that_have_not_joined_the_fabric() -> None:  # siderolabs/extensions/pull/717: "In Progress"
    record = eight_gpus()
    record["moment"]["gpus"][3]["fabric"] = "In Progress"
    (found,) = [
        finding for finding in findings(record, eight_gpu_needs()) if finding.rule == "fabric-manager"
    ]
    assert found.message == "GPU 3 has not joined the fabric (In Progress)"


def test_what_is_no_matrix_is_said_to_be_none() -> None:  # cfregly/ai-performance-engineering/issues/8
    with pytest.raises(NotUnderstoodError):
        gpu.parse_topology("The -i command line argument must be used in conjunction with -n or -p.\n")
