# SPDX-License-Identifier: Apache-2.0
"""Stack files, the check, differences between environments, and cells that ran elsewhere."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from environments import eight_gpu_needs, eight_gpus, two_core_needs, two_cores

from splitbench.cli import main
from splitbench.environment import probe, stage
from splitbench.environment.check import check, table
from splitbench.environment.difference import differences, read_environment
from splitbench.environment.expectations import LOOKUPS, StackFile, compare, look_up, read_stack_file
from splitbench.environment.needs import GIB, needs_of
from splitbench.environment.neighbours import strangers
from splitbench.environment.probes.base import Outcome
from splitbench.errors import UserError
from splitbench.experiment.load import read_experiment
from splitbench.files import read_json, write_json
from splitbench.report.stage import _environment
from splitbench.serving.render import render

ROOT = Path(__file__).parents[3]
STACKS = sorted((ROOT / "config/stacks").glob("*.yaml"))


def stack(**entries: object) -> StackFile:
    return StackFile.model_validate({"name": "test", "expects": entries})


def test_every_policy_gives_its_verdict() -> None:
    record = eight_gpus()
    lines = compare(
        stack(
            gpus={"minimum": 8},
            driver={"range": ">=580,<581"},
            lmcache={"exact": "0.3.10"},
            kernel="record",
            vllm={"exact": "0.10.2"},
            torch_cuda={"minimum": 13.0},
            nixl={"range": ">=1"},
            ofed={"exact": "3.0.0-058218", "mend": "install DOCA-OFED"},
        ),
        record,
    )
    assert [line.verdict for line in lines] == [
        *("ok", "ok", "ok", "recorded"),
        *("mismatch", "mismatch", "mismatch", "missing"),
    ]
    assert lines[-1].mend == "install DOCA-OFED" and lines[4].mend == "use the lock that has vllm 0.10.2"
    assert all(line.mend == "" for line in lines[:4])


def test_packages_can_be_named() -> None:
    record = eight_gpus()
    assert look_up("python:torch", record) == "2.8.0"
    assert look_up("system:cuda-nvcc-13-0", record) == "13.0.88-1"
    assert look_up("python:nothing", record) is None


@pytest.mark.parametrize("name", sorted(LOOKUPS))
def test_facts_of_an_empty_record_are_not_known(name: str) -> None:
    assert look_up(name, {"machine": {}, "moment": {}, "software": {}}) in (None, 0)
    look_up(name, eight_gpus())
    look_up(name, two_cores())


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"drivr": {"minimum": "1"}}, "did you mean 'driver'"),
        ({"driver": {"minimum": "1", "exact": "1"}}, "give exactly one"),
        ({"driver": {}}, "give exactly one"),
        ({"driver": {"range": "newest"}}, "write it like"),
        ({"gpu_name": {"minimum": "H100"}}, "neither a version nor a number"),
        ({"driver": {"policy": "exact"}}, "driver.policy"),
    ],
)
def test_a_wrong_stack_file_is_one_line(tmp_path: Path, entry: dict[str, object], says: str) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "expects": entry}))
    with pytest.raises(UserError) as caught:
        read_stack_file(path)
    assert says in str(caught.value) and "\n" not in str(caught.value) and "stack.yaml" in str(caught.value)


@pytest.mark.parametrize("path", STACKS, ids=lambda path: path.stem)
def test_stack_files_in_the_repository_can_be_read(path: Path) -> None:
    assert read_stack_file(path).name == path.stem


def test_the_stacks_fit_the_machines_they_are_for() -> None:
    h100 = eight_gpus()
    for gpu in h100["machine"]["gpus"]:
        gpu |= {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 81559 * 2**20}
    result = check(h100, eight_gpu_needs(), read_stack_file(ROOT / "config/stacks/sakura-h100.yaml"))
    assert result.fits, result.summary()
    result = check(two_cores(), two_core_needs(), read_stack_file(ROOT / "config/stacks/cpu.yaml"))
    assert result.fits, result.summary()
    wrong = check(two_cores(), eight_gpu_needs(), read_stack_file(ROOT / "config/stacks/sakura-h100.yaml"))
    assert not wrong.fits and "gpus is 0, expected >= 8" in wrong.summary()
    assert "no NVIDIA driver answers here" in wrong.summary()


def test_the_table_shows_what_was_expected_and_found() -> None:
    lines = table(compare(stack(gpus={"minimum": 16}, kernel="record"), eight_gpus()))
    assert lines[0].split() == ["expected", "found", "verdict", "mend"]
    assert lines[1].split()[:5] == ["gpus", ">=", "16", "8", "mismatch"] and "run on a machine" in lines[1]


def test_going_on_is_on_record() -> None:
    result = check(eight_gpus(), eight_gpu_needs(), stack(gpus={"minimum": 16}))
    assert result.as_json("warn")["went_on"] is True and result.as_json("fail")["went_on"] is False
    assert check(eight_gpus(), eight_gpu_needs(), None).as_json("warn")["went_on"] is False
    json.dumps(result.as_json("warn"), allow_nan=False)


def test_a_failed_probe_is_told() -> None:
    record = eight_gpus()
    record["probes"]["ofed"] = {
        "source": "ofed_info -s",
        "status": "failed: no answer in 5 s",
        "seconds": 5.0,
    }
    result = check(record, eight_gpu_needs(), None)
    assert result.fits and result.text() == ["not known: ofed (ofed_info -s) failed: no answer in 5 s"]


def test_needs_of_the_experiments_in_the_repository() -> None:
    h100 = read_experiment(ROOT / "config/experiments/sakura-h100.yaml")
    needs = needs_of({name: render(h100, name) for name in h100.layouts})
    assert needs.kind == "gpus" and needs.devices == tuple(range(8)) and needs.connectors == ("lmcache",)
    assert all(engine.env["PYTHONHASHSEED"] == "0" for engine in needs.engines if engine.lmcache)
    assert sum(engine.lmcache for engine in needs.engines) >= 4
    assert all(engine.host_bytes == 0 for engine in needs.engines)
    cpu = read_experiment(ROOT / "config/config.yaml")
    needs = needs_of({name: render(cpu, name) for name in cpu.layouts})
    assert needs.kind == "cores" and {engine.host_bytes for engine in needs.engines} == {GIB}
    assert len(needs.ports) >= 4


def test_needs_of_lmcache_s_server() -> None:
    config = read_experiment(ROOT / "config/experiments/cpu-lmcache-mp.yaml")
    needs = needs_of({name: render(config, name) for name in config.layouts})
    assert needs.by_lmcache and "lmcache-mp" in needs.connectors
    servers = [engine for engine in needs.engines if not engine.devices]
    assert servers and all(server.host_bytes > 0 for server in servers)
    record = two_cores()
    record["software"]["packages"] |= {"lmcache": "0.5.6"}
    record["software"]["missing_symbols"]["lmcache"] = ["_ZN3c104cuda9SetDeviceEab"]
    assert check(record, needs, None).errors == []
    # On a GPU the same would be fatal.
    assert any(error.rule == "torch-abi" for error in check(record, replace(needs, kind="gpus"), None).errors)


def test_buffers_in_host_memory_count_for_every_rank() -> None:
    config = read_experiment(ROOT / "config/experiments/sakura-h100.yaml")
    layout = config.layouts["pd-tp2"].model_copy(update={"kv_buffer_device": "cpu", "kv_buffer_gb": 3.0})
    config = config.model_copy(update={"layouts": {"pd-tp2": layout}})
    needs = needs_of({"pd-tp2": render(config, "pd-tp2")})
    assert [engine.host_bytes for engine in needs.engines] == [2 * 3 * GIB] * 2


def test_differences_are_in_words() -> None:
    a, b = eight_gpus(), eight_gpus()
    assert differences(a, b) == []
    b["machine"]["driver"]["version"] = "580.95.05"
    b["machine"]["gpus"][3]["power_limit_w"] = 500
    b["software"]["packages"]["vllm"] = "0.12.0"
    del b["software"]["packages"]["pillow"]
    assert differences(a, b) == [
        "GPU driver: 580.159.04 in A, 580.95.05 in B",
        "GPU 3 power_limit_w: 700 in A, 500 in B",
        "Python package pillow: only in A (12.0.0)",
        "Python package vllm: 0.11.0 in A, 0.12.0 in B",
    ]


def test_load_heat_and_names_of_a_machine_are_no_difference() -> None:
    a, b = eight_gpus(), eight_gpus()
    b["moment"] = {}
    b["machine"]["gpus"][0]["uuid"] = "GPU-1"
    b["machine"]["environment"] = {"OMP_NUM_THREADS": "1"}
    b["machine"]["memory"]["total_bytes"] += 4096
    assert differences(a, b) == [] and probe.environment_digest(a) == probe.environment_digest(b)
    b["machine"]["system"]["kernel"] = "6.9.0"
    assert probe.environment_digest(a) != probe.environment_digest(b)


def test_a_slimmed_bundle_is_another_environment() -> None:
    a, b = eight_gpus(), eight_gpus()
    b["serving"]["bundle"] = {"name": "h200", "slimmed": 12}
    assert differences(a, b) == ["bundle.name: only in B (h200)", "bundle.slimmed: only in B (12)"]
    assert probe.environment_digest(a) != probe.environment_digest(b)


def test_records_are_found_and_others_refused(tmp_path: Path) -> None:
    folder = tmp_path / "results/x/environment"
    write_json(folder / "probe-cpu-1.json", two_cores())
    assert read_environment(tmp_path)["digest"] == two_cores()["digest"]
    write_json(tmp_path / "other.json", {"a": 1})
    for wrong in (tmp_path / "other.json", tmp_path / "none.json", folder.parent / "cells"):
        with pytest.raises(UserError):
            read_environment(wrong)


def test_a_record_of_an_older_form_can_be_compared() -> None:
    old = {"machine": {"cpu": {"model": "X"}}, "serving": {"packages": {"vllm": "1"}}}
    new = copy.deepcopy(old)
    new["machine"]["cpu"]["model"] = "Y"
    assert differences(old, new) == ["processor: X in A, Y in B"]
    assert probe.environment_digest(old) != probe.environment_digest(new)


def test_private_names_do_not_get_into_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.Path, "home", lambda: Path("/home/alice"))
    monkeypatch.setattr(probe.socket, "gethostname", lambda: "gpu-node-7")
    facts = {"environment": {"LMCACHE_CONFIG_FILE": "/home/alice/x", "CUDA_HOME": "/home/bob/cuda"}}
    outcome = Outcome("variables", "gpu-node-7: environ", "ok", 0.0, facts)
    record = probe.assemble([outcome], [], {})
    assert record["machine"]["environment"] == {
        "LMCACHE_CONFIG_FILE": "~/x",
        "CUDA_HOME": "/home/<user>/cuda",
    }
    assert record["probes"]["variables"]["source"] == "<host>: environ"
    assert "machine.gpus.*.uuid" in record["private"]


def test_cells_made_elsewhere_are_strangers() -> None:
    cells = pd.DataFrame(
        {"cell_id": ["a", "b", "c", "d"], "environment_digest": ["1" * 64, "1" * 64, "2" * 64, None]}
    )
    assert strangers(cells) == {"c": "made in environment 22222222, 2 of 3 cells in 11111111"}
    assert strangers(cells[cells["cell_id"] != "c"]) == {}
    assert strangers(cells.drop(columns="environment_digest")) == {}


def test_the_report_says_that_a_run_went_on_and_that_cells_are_strangers() -> None:
    cells = pd.DataFrame({"cell_id": ["a", "b", "c"], "environment_digest": ["1" * 64, "1" * 64, "2" * 64]})
    measured = SimpleNamespace(cells=cells)
    bad = check(eight_gpus(), eight_gpu_needs(), stack(gpus={"minimum": 16})).as_json("warn")
    facts = _environment(bad, measured)  # type: ignore[arg-type]
    assert "in spite of it" in facts["checked against the experiment"] and "gpus is 8" in str(facts)
    assert facts["environments"].startswith("1 of 3 cells")
    good = check(eight_gpus(), eight_gpu_needs(), stack(gpus={"minimum": 8})).as_json("fail")
    assert _environment(good, SimpleNamespace(cells=cells[:2])) == {  # type: ignore[arg-type]
        "checked against the experiment": "fits test"
    }


def test_another_machine_is_probed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = SimpleNamespace(path=lambda name: str(tmp_path / name), serving_python=Path("/no/such/python"))
    recorded = tmp_path / "probe.json"
    record = probe.probe_environment(None)
    write_json(recorded, record)
    said: list[str] = []
    assert stage.environment_now(flow, recorded, {}, said.append) == recorded  # type: ignore[arg-type]
    write_json(recorded, record | {"fingerprint": {"cpu": "another"}})
    here = stage.environment_now(flow, recorded, {}, said.append)  # type: ignore[arg-type]
    assert here != recorded and read_json(here)["fingerprint"] == record["fingerprint"] and len(said) == 1
    assert read_json(here)["digest"][:16] == here.stem


def test_packages_that_changed_on_the_same_machine_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = SimpleNamespace(path=lambda name: str(tmp_path / name), serving_python=Path("/no/such/python"))
    listed = tmp_path / "status"
    listed.write_text("Package: ucx\n", encoding="utf-8")
    monkeypatch.setattr(probe, "_PACKAGE_LISTS", (str(listed), str(tmp_path / "none")))
    recorded = tmp_path / "probe.json"
    write_json(recorded, probe.probe_environment(None))
    assert stage.environment_now(flow, recorded, {}, [].append) == recorded  # type: ignore[arg-type]
    listed.write_text("Package: ucx\nPackage: doca-ofed\n", encoding="utf-8")
    assert stage.environment_now(flow, recorded, {}, [].append) != recorded  # type: ignore[arg-type]


def test_two_dates_of_one_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Two folders of results from one server: in March, and in May after an update of driver and OFED.
    march, may = eight_gpus(), eight_gpus()
    march["machine"]["packages"] = {"doca-ofed": "3.0.0-058218", "libnccl2": "2.27.3"}
    may["machine"]["packages"] = {"doca-ofed": "3.1.0-091000", "libnccl2": "2.27.3"}
    may["machine"]["driver"]["version"] = "580.105.08"
    may["machine"]["fabric_manager"] = {"package": "580.105.08-1"}
    may["moment"] = {"gpus": [], "listening": [22, 8000]}
    for name, record in (("march", march), ("may", may)):
        write_json(tmp_path / name / "results/x/environment/probe-cuda-1.json", record)
    assert main(["environment", "diff", str(tmp_path / "march"), str(tmp_path / "may")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "GPU driver: 580.159.04 in A, 580.105.08 in B",
        "fabric manager: 580.159.04-1 in A, 580.105.08-1 in B",
        "system package doca-ofed: 3.0.0-058218 in A, 3.1.0-091000 in B",
    ]
    assert main(["environment", "diff", str(tmp_path / "may"), str(tmp_path / "may")]) == 0
