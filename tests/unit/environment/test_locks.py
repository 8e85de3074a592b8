# SPDX-License-Identifier: Apache-2.0
"""The locks of serving stacks: whole, hashed, of one UCX, and free of traces of where they were made."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from environments import eight_gpu_needs, eight_gpus

from splitbench.environment import serving_software
from splitbench.environment.interpreters import interpreter_for
from splitbench.environment.needs import Needs
from splitbench.environment.rules import findings
from splitbench.environment.serving_environment import lock_python, read_lock
from splitbench.environment.serving_software import dynamic_symbols, missing_symbols
from splitbench.errors import UserError

ENVS = Path(__file__).parents[3] / "envs"
KEPT = Path(__file__).parents[2] / "fixtures" / "vllm"
CUDA = ["serving-cuda-lmcache-0.3.10.lock", "serving-cuda.lock"]


@pytest.mark.parametrize("name", [*CUDA, "serving-cpu.lock"])
def test_no_address_and_no_option_stands_in_a_lock(name: str) -> None:
    text = (ENVS / name).read_text(encoding="utf-8")
    assert not re.search(r"^--|://", text, re.MULTILINE)


@pytest.mark.parametrize("name", CUDA)
def test_every_line_is_hashed_and_what_was_asked_for_is_there(name: str) -> None:
    lock = {locked.name: locked for locked in read_lock(ENVS / name)}
    assert all(locked.hashed for locked in lock.values()) and lock_python(ENVS / name) == "3.12"
    asked = (ENVS / name).with_suffix(".in").read_text(encoding="utf-8")
    pins = re.findall(r"^([\w-]+)==([\w.]+)", asked, re.MULTILINE)
    assert len(pins) >= 3
    assert [lock[package].version for package, _ in pins] == [version for _, version in pins]


@pytest.mark.parametrize(("name", "cuda"), [(CUDA[0], "12.8"), (CUDA[1], "13.0")])
def test_locks_break_no_rule_about_versions(name: str, cuda: str) -> None:
    packages = {locked.name: locked.version for locked in read_lock(ENVS / name)}
    software = {
        "packages": packages,
        "python": "3.12.3",
        "torch": {"version": packages["torch"], "cuda": cuda},
    }
    record = {"machine": {"driver": {"version": "580.95.05"}}, "moment": {}, "software": software}
    assert findings(record, Needs(kind="gpus", connectors=("lmcache", "nixl"))) == []


@pytest.mark.parametrize(
    ("lock", "rules"),
    # vLLM 0.32 may use its second model runner, under which the reference's connector loads nothing: that is said.
    [("cuda-lmcache-0.3.10", []), ("cuda", ["lmcache-runner"])],
)
def test_the_installed_locks_break_no_other_rule_on_eight_gpus(lock: str, rules: list[str]) -> None:
    # What the probe found of the environments that the workflow made from the locks; machine and driver are kept ones.
    software = json.loads((KEPT / f"software-{lock}.json").read_text(encoding="utf-8"))
    packages = {locked.name: locked.version for locked in read_lock(ENVS / f"serving-{lock}.lock")}
    assert software["packages"] == packages
    assert "UCX" in software["nixl"]["usable"] and software["missing_symbols"] == {"lmcache": [], "vllm": []}
    record = eight_gpus() | {"software": software}
    assert [finding.rule for finding in findings(record, eight_gpu_needs())] == rules


class _OldConfig:
    """nixlAgentConfig of NIXL 0.6.1, whose settings are arguments and not optional."""

    def __init__(self, progress_thread: bool, listen_thread: bool = False) -> None:
        self.given = (progress_thread, listen_thread)


class _NewConfig:
    useProgThread = True  # noqa: N815 (NIXL's own name)


def test_nixl_s_settings_old_and_new() -> None:
    old = serving_software._nixl_config(SimpleNamespace(nixlAgentConfig=_OldConfig))
    new = serving_software._nixl_config(SimpleNamespace(nixlAgentConfig=_NewConfig))
    assert old.given == (False, False) and new.useProgThread is False


def test_cuda_of_the_wheels_is_loaded_before_nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "nvidia/cuda_runtime/lib/libcudart.so.12"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no library")  # one that does not load is no error: NIXL says what it lacks
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    loaded: list[str] = []
    monkeypatch.setattr(serving_software.ctypes, "CDLL", lambda name, mode: loaded.append(name))
    serving_software._load_cuda()
    assert loaded == [str(library)]


def test_a_lock_for_another_python_asks_for_that_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert interpreter_for(None, None) == interpreter_for(here, None) == sys.executable
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    assert interpreter_for("3.99", Path("/bin/uv")) == "3.99"
    with pytest.raises(UserError, match=r"install python3\.99"):
        interpreter_for("3.99", None)


def test_a_shim_that_does_not_run_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # pyenv has a shim for each version that it knows, and runs those that were chosen; uv stops at the first too.
    def python(path: Path, says: str) -> Path:
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{says}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    python(tmp_path / "shims/python3.99", "exit 127")
    python(tmp_path / "liar/python3.99", "echo 3.98")
    kept = python(tmp_path / "root/versions/3.99.1/bin/python3.99", "echo 3.99")
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:{tmp_path}/liar")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "root"))
    assert interpreter_for("3.99", None) == str(kept)
    first = python(tmp_path / "bin/python3.99", "echo 3.99")
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:{tmp_path}/bin")
    assert interpreter_for("3.99", Path("/bin/uv")) == str(first)


def test_symbols_are_read_from_real_libraries() -> None:
    extension = next(Path(sys.prefix).glob("lib/python*/site-packages/numpy/_core/_multiarray_umath*.so"))
    # numpy asks for nothing of torch; a C++ library of torch's kind is checked where one is installed.
    assert missing_symbols(extension, []) == []
    symbols = dict(dynamic_symbols(extension))
    assert symbols[b"PyInit__multiarray_umath"] is True and symbols[b"PyObject_GetAttrString"] is False


def test_something_else_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"#!/bin/sh\n")
    with pytest.raises(ValueError, match="ELF"):
        list(dynamic_symbols(tmp_path / "x.so"))


def test_torch_is_found_outside_of_the_environment_s_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    text = "from typing import Optional\n__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n"
    (tmp_path / "torch/version.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert serving_software._torch() == {"version": "2.11.0+cu130", "cuda": "13.0"}
    # Without torch's libraries nothing can be said about symbols.
    assert serving_software.abi() == {"missing_symbols": {}}


def test_of_two_that_are_installed_the_first_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("bundle", "0.26.0"), ("system", "0.25.0")):
        info = tmp_path / folder / f"vllm-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "bundle"), str(tmp_path / "system")])
    assert serving_software.packages()["packages"] == {"vllm": "0.26.0"}
