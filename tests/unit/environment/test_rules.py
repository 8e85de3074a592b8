# SPDX-License-Identifier: Apache-2.0
"""Every rule speaks up for what it is about, and for nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from environments import eight_gpu_needs, eight_gpus, two_core_needs, two_cores
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from splitbench.environment import versions
from splitbench.environment.needs import EngineNeed, Needs
from splitbench.environment.rules import all_rules, findings

Spoil = Callable[[dict[str, Any]], object]
Ask = Callable[[Needs], Needs]


def at(path: str, value: object) -> Spoil:
    """Set one value, given by a dotted path."""

    def spoil(record: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        part: Any = record
        for name in parents:
            part = part[int(name)] if isinstance(part, list) else part.setdefault(name, {})
        part[int(last) if isinstance(part, list) else last] = value

    return spoil


def package(name: str, version: str) -> Spoil:
    return lambda record: record["software"]["packages"].__setitem__(name, version)


def without(name: str) -> Spoil:
    return lambda record: record["software"]["packages"].pop(name)


def all_of(*spoils: Spoil) -> Spoil:
    return lambda record: [spoil(record) for spoil in spoils]


def engines(**changes: Any) -> Ask:
    """The same needs with every engine changed."""
    return lambda needs: replace(needs, engines=tuple(replace(engine, **changes) for engine in needs.engines))


def nixl(needs: Needs) -> Needs:
    return replace(needs, connectors=("nixl",))


SEEDED: list[tuple[str, Spoil | None, Ask | None]] = [
    ("no-driver", at("machine.driver", {}), None),
    ("driver-too-old", all_of(at("software.torch.cuda", "13.0"), without("cupy-cuda12x"),
                              at("machine.driver", {"version": "575.57.08", "module": "575.57.08"}),
                              at("machine.fabric_manager.package", "575.57.08-1")), None),
    ("driver-halves", at("machine.driver.module", "580.95.05"), None),
    ("torch-without-cuda", all_of(at("software.torch", {"version": "2.8.0+cpu", "cuda": None})), None),
    ("torch-pin", package("torch", "2.9.0"), None),
    ("torch-abi", at("software.missing_symbols.lmcache", ["_ZN3c104cuda9SetDeviceEa"]), None),
    ("lmcache-vllm", all_of(package("vllm", "0.17.0")), None),
    ("lmcache-vllm", all_of(package("vllm", "0.10.1.1")), None),
    ("lmcache-runner", all_of(package("vllm", "0.26.0"), package("lmcache", "0.5.2")), engines(moves_packed_kv=True)),
    ("lmcache-packed-kv", all_of(package("vllm", "0.26.0"), package("lmcache", "0.5.2")),
     engines(env={"VLLM_USE_V2_MODEL_RUNNER": "0", "PYTHONHASHSEED": "0"})),
    ("lmcache-python", at("software.python", "3.11.9"), None),
    ("connector-missing", without("lmcache"), None),
    ("connector-missing", without("nixl"), None),
    ("cupy-cuda", all_of(without("cupy-cuda12x"), package("cupy-cuda13x", "14.0.0")), None),
    ("nixl-cuda", all_of(package("nixl-cu13", "1.5.1")), None),
    ("nixl-too-old", package("nixl", "0.4.1"), nixl),
    ("nixl-plugin", at("software.nixl.usable", ["GDS"]), None),
    ("nixl-plugin", at("software.nixl", {"module": None, "why": "libcuda.so.1: cannot open"}), None),
    ("two-ucx", lambda record: record["software"]["ucx"].append({"where": "ucxx", "version": "1.18.1"}), None),
    ("two-ucx", at("machine.environment.LD_LIBRARY_PATH", "/opt/hpcx/ucx/lib"), None),
    ("ucx-too-old", at("software.ucx.0.version", "1.17.0"), None),
    ("requirements", package("numpy", "2.3.1"), None),
    ("gpu-count", lambda record: [record["machine"]["gpus"].pop(), record["moment"]["gpus"].pop()], None),
    ("gpus-differ", at("machine.gpus.3.name", "NVIDIA H100 PCIe"), None),
    ("power-limit", lambda record: [gpu.__setitem__("power_limit_w", 500) for gpu in record["machine"]["gpus"]], None),
    ("mig", at("machine.gpus.2.mig", True), None),
    ("compute-mode", at("machine.gpus.0.compute_mode", "Prohibited"), None),
    ("compute-mode", at("machine.gpus.0.compute_mode", "Exclusive_Process"),
     lambda needs: replace(needs, engines=(*needs.engines, EngineNeed("pd-tp4/x", "pd-tp4", (0,))))),
    ("gpu-idle", at("moment.gpus.1.processes", [{"pid": 7, "name": "python", "memory_bytes": 2**30}]), None),
    ("gpu-held-back", at("moment.gpus.1.clocks_held_by", ["hw_thermal_slowdown"]), None),
    ("fabric-manager", at("machine.fabric_manager.package", "580.95.05-1"), None),
    ("fabric-manager", at("moment.fabric_manager.service", "failed"), None),
    ("fabric-manager", at("moment.gpus.5.fabric", "In Progress"), None),
    ("nvlink", at("machine.nvlink.0.links_gb_s.3", 0.0), None),
    ("nvlink", at("machine.topology.links.GPU0.GPU1", "SYS"), None),
    ("hash-seed", None, engines(env={})),
    ("host-memory", None, engines(host_bytes=2**36)),
    ("shared-memory", at("machine.memory.shm_total_bytes", 64 * 2**20), None),
    ("locked-memory", at("machine.limits.locked_memory_bytes", 8 * 2**20), None),
    ("cpu-without-avx", at("machine.cpu.avx", False), None),
    ("ports-free", at("moment.listening", [22, 17101]), None),
    ("clocksource", at("machine.system.clocksource", "hpet"), None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "spoil", "ask"), SEEDED, ids=[f"{n}-{case[0]}" for n, case in enumerate(SEEDED)]
)
def test_a_seeded_mismatch_gives_its_finding_and_no_other(
    rule: str, spoil: Spoil | None, ask: Ask | None
) -> None:
    record, needs = eight_gpus(), eight_gpu_needs()
    if spoil:
        spoil(record)
    if ask:
        needs = ask(needs)
    found = findings(record, needs)
    assert {finding.rule for finding in found} == {rule}
    for finding in found:
        assert finding.message and finding.mend and finding.source.startswith("https://")
        assert "\n" not in finding.message


def test_a_core_that_is_not_there() -> None:
    record = two_cores()
    record["machine"]["cpu"]["cores_usable"] = [0]
    assert [finding.rule for finding in findings(record, two_core_needs())] == ["cores"]


def test_every_rule_was_seeded() -> None:
    assert {rule.id for rule in all_rules()} == {case[0] for case in SEEDED} | {"cores"}
    documented = (Path(__file__).parents[3] / "docs/environment.md").read_text(encoding="utf-8")
    for rule in all_rules():
        assert f"| `{rule.id}` | {rule.severity} | {rule.says} | [source]({rule.source}) |" in documented


def test_sound_environments_give_nothing() -> None:
    assert findings(eight_gpus(), eight_gpu_needs()) == []
    assert findings(two_cores(), two_core_needs()) == []


def test_what_is_not_known_is_not_held_against_anybody() -> None:
    empty = {"machine": {}, "moment": {}, "software": {}}
    assert findings(empty, two_core_needs()) == []
    assert [finding.rule for finding in findings(empty, eight_gpu_needs())] == ["no-driver"]


@given(st.data())
def test_rules_bear_any_hole_in_a_record(data: st.DataObject) -> None:
    record = copy.deepcopy(data.draw(st.sampled_from([_EIGHT, _TWO])))
    for section in ("machine", "moment", "software"):
        for key in data.draw(st.sets(st.sampled_from(sorted(record[section])))):
            record[section][key] = None
    findings(record, data.draw(st.sampled_from([eight_gpu_needs(), two_core_needs()])))


def test_a_session_of_ours_is_no_stranger() -> None:
    record = eight_gpus()
    record["moment"]["listening"] = [17100]
    record["moment"]["gpus"][0]["processes"] = [{"pid": 7, "name": "python", "memory_bytes": 2**35}]
    assert findings(record, replace(eight_gpu_needs(), session_up=True)) == []


_RELEASE = st.lists(st.integers(0, 30), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
_SUFFIX = st.sampled_from(["", "rc1", "a2", ".dev3", ".post1", "b4"])
_VERSION = st.builds(lambda release, suffix: release + suffix, _RELEASE, _SUFFIX)


@given(_VERSION, _VERSION)
def test_versions_sort_as_pep_440_has_it(a: str, b: str) -> None:
    left, right = versions.key(a), versions.key(b)
    assert left is not None and right is not None
    assert (left < right) == (Version(a) < Version(b))
    assert (left == right) == (Version(a) == Version(b))


@given(_VERSION, st.sampled_from([">=", "<=", "==", "!="]), _RELEASE)
def test_ranges_mean_what_pep_440_says(version: str, operator: str, wanted: str) -> None:
    clause = f"{operator}{wanted}"
    assert versions.within(version, clause) == SpecifierSet(clause).contains(version, prereleases=True)


def test_versions_as_distributions_write_them() -> None:
    assert versions.same("580.95.05-0ubuntu0.22.04.2", "580.95.05")
    assert versions.same("13.0.88-1", "13.0.88-1") and not versions.same("13.0.88-1", "13.0.88-2")
    assert versions.same("2.11.0+cu130", "2.11.0") and not versions.same("2.11.0", "2.11.0+cu130")
    assert versions.same("3daa987", "3daa987") and not versions.same("1.2", "3daa987")
    assert versions.within("580.159.04", ">=580.95.05,<581") and not versions.within("575.57.08", ">=580")
    assert versions.within("0.10.2", "==0.10.*") and not versions.within("0.11", "==0.10.*")
    assert not versions.valid_range("newer than 3") and not versions.valid_range(">=1.*")


_EIGHT, _TWO = eight_gpus(), two_cores()
