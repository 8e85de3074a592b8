# SPDX-License-Identifier: Apache-2.0
"""Offline bundle: what goes in, what is left out, and that it comes out again on a node with nothing but Python."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from splitbench.environment.binaries import (
    MACHINE_CODE,
    PTX,
    fat_binaries,
    keep_architecture,
    needed_libraries,
)
from splitbench.environment.bootstrap import BundleError, bootstrap, check_imports, site_of
from splitbench.environment.bundle import make_bundle, read_spec, wanted
from splitbench.errors import UserError

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\0") + struct.pack(
        "<I", architecture
    )
    return header.ljust(64, b"\0") + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_the_code_that_the_gpu_loads_is_kept(tmp_path: Path) -> None:
    machine = container(
        entry(MACHINE_CODE, 80, b"A" * 40), entry(MACHINE_CODE, 90, b"B" * 40), entry(PTX, 90, b"C" * 40)
    )
    texts = container(entry(PTX, 80, b"D" * 40), entry(PTX, 89, b"E" * 40), entry(PTX, 100, b"F" * 40))
    large = container(entry(MACHINE_CODE, 80, b"G" * 40), entry(PTX, 80, b"H" * 400))
    path = tmp_path / "it.so"
    before = b"\x50\xed\x55\xba front" + machine + b"middle" + texts + large + b"end"
    path.write_bytes(before)
    assert [len(entries) for entries in fat_binaries(before)] == [3, 3, 2]
    done = keep_architecture(path, 90, largest_ptx=100)
    after = path.read_bytes()
    assert len(after) == len(before)
    assert [letter for letter in "ABCDEFGH" if letter.encode() * 40 in after] == ["B", "E"]
    assert (done.kept, done.blanked) == (80, 40 * 5 + 400)
    assert after.endswith(b"end") and b"middle" in after
    # What is left is still readable as what it was.
    assert [len(entries) for entries in fat_binaries(after)] == [3, 3, 2]


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_a_damaged_file_is_left_alone(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "it.so"
    whole = container(entry(MACHINE_CODE, 80, b"A" * 40), entry(MACHINE_CODE, 90, b"B" * 40))
    path.write_bytes(whole[:cut])
    assert keep_architecture(path, 90).blanked == 0
    assert path.read_bytes() == whole[:cut]


def test_needed_libraries_of_a_real_shared_object() -> None:
    import pyarrow

    found = needed_libraries(next(Path(pyarrow.__file__).parent.glob("lib.cpython*.so")))
    assert any(name.startswith("libarrow.so") for name in found)
    assert any(name.startswith("libc.so") for name in found)
    assert needed_libraries(Path(__file__)) == []


def wheel(folder: Path, name: str, files: dict[str, str]) -> str:
    """A wheel of version 1.0; returns its line for a lock."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of three small packages, from wheels in a folder."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    (tmp_path / "serving.lock").write_text(
        wheel(
            index, "alpha", {"alpha/__init__.py": "import beta\nvalue = beta.value\n", "alpha/tests/t.py": ""}
        )
        + wheel(index, "beta", {"beta.py": "value = 'carried'\n", "beta-1.0.data/scripts/run": "#!python"})
    )
    (tmp_path / "workflow.lock").write_text(
        wheel(index, "gamma", {"gamma.py": "value = 3\n"})
        + "delta==2.0 --hash=sha256:00\n"
        + "windowsonly==1.0 ; sys_platform == 'win32' --hash=sha256:00\n"
    )
    (tmp_path / "node.present").write_text("# what is there\nDelta==1.9\n")
    spec = {
        "name": "it",
        "python": HERE,
        "platforms": ["manylinux_2_28_x86_64"],
        "locks": ["serving.lock", "workflow.lock"],
        "present": "node.present",
        "later": ["gamma"],
        "drop": ["alpha/tests", "**/*.pyx"],
        "environment": {"SOME_PLACE": "{folder}/place"},
        "carry_mib": 2,
        "part_mib": 2,
    }
    path = tmp_path / "it.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def test_it_comes_out_as_an_environment_of_its_own(recipe: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "bundle", tmp_path / "environment"
    manifest = make_bundle(recipe, out, wheels=None, progress=lambda text: None)
    assert manifest["packages"] == {"alpha": "1.0", "beta": "1.0", "gamma": "1.0"}
    assert sorted(path.name for path in out.iterdir()) == ["carry-1"]
    # As on the node: the script alone, run by an interpreter that has no splitbench.
    shown = subprocess.run(
        [
            sys.executable,
            "-I",
            out / "carry-1" / "bootstrap.py",
            folder,
            "--check",
            "alpha",
            "gamma",
            "pytest",
        ],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    program = "import alpha, sys; print(alpha.value, alpha.__file__, sys.prefix)"
    found = subprocess.run(
        [folder / "bin" / "python", "-c", program], capture_output=True, text=True, check=True
    )
    value, file, prefix = found.stdout.split()
    assert (value, prefix) == ("carried", str(folder))
    assert Path(file).is_relative_to(folder)
    assert not (site_of(folder) / "alpha" / "tests").exists()
    assert f"export SOME_PLACE={folder}/place" in (folder / "environment.sh").read_text()
    assert check_imports(folder, ["alpha", "nowhere_at_all"]) == [
        "nowhere_at_all: ModuleNotFoundError: No module named 'nowhere_at_all'"
    ]


def test_carries_may_come_one_by_one_and_damage_is_seen(recipe: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "bundle", tmp_path / "environment"
    make_bundle(recipe, out, wheels=None, progress=lambda text: None)
    carry = out / "carry-1"
    manifest = json.loads((carry / "manifest.json").read_text())
    # Two carries out of one: what would not fit into a transfer.
    first, second = out / "a", out / "b"
    for place, number, parts in ((first, 1, manifest["parts"][:1]), (second, 2, manifest["parts"][1:])):
        place.mkdir()
        text = json.dumps(manifest | {"carry": number, "carries": 2, "parts": parts})
        (place / "manifest.json").write_text(text)
        for part in parts:
            for piece in part["pieces"]:
                (place / piece).write_bytes((carry / piece).read_bytes())
    assert bootstrap(folder, [first])["missing"] == 1
    damaged = second / json.loads((second / "manifest.json").read_text())["parts"][0]["pieces"][0]
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1] + b"?")
    with pytest.raises(BundleError, match="damaged"):
        bootstrap(folder, [second])
    damaged.write_bytes(good)
    record = bootstrap(folder, [second])
    assert record["missing"] == 0
    assert check_imports(folder, ["alpha", "gamma"]) == []
    # Once more is nothing: no part is unpacked twice.
    assert bootstrap(folder, [first, second])["unpacked"] == record["unpacked"]
    other = json.loads((first / "manifest.json").read_text()) | {"digest": "another"}
    (first / "manifest.json").write_text(json.dumps(other))
    with pytest.raises(BundleError, match="another bundle"):
        bootstrap(folder, [first])


def test_a_node_with_another_python_is_told_so(recipe: Path, tmp_path: Path) -> None:
    make_bundle(recipe, tmp_path / "bundle", wheels=None, progress=lambda text: None)
    path = tmp_path / "bundle" / "carry-1" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"python": "3.7"}))
    with pytest.raises(BundleError, match=f"made for Python 3.7, this is {HERE}"):
        bootstrap(tmp_path / "environment", [path.parent])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("drop", ["beta/nothing"], "'beta/nothing' names nothing"), ("python", "2", "validation error")],
)
def test_mistakes_in_the_recipe_are_said(
    recipe: Path, tmp_path: Path, key: str, value: object, words: str
) -> None:
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | {key: value}))
    with pytest.raises(UserError, match=words):
        make_bundle(recipe, tmp_path / "bundle", wheels=None, progress=lambda text: None)


def test_a_wheel_that_is_not_the_locks_is_refused(recipe: Path, tmp_path: Path) -> None:
    wheel(tmp_path / "index", "beta", {"beta.py": "value = 'forged'\n"})
    with pytest.raises(UserError, match=r"(?i)hash"):
        make_bundle(recipe, tmp_path / "bundle", wheels=None, progress=lambda text: None)


def test_the_recipe_for_hopper_carries_what_the_node_lacks() -> None:
    path = Path(__file__).resolve().parents[3] / "envs" / "bundles" / "h200.yaml"
    found = {locked.name: locked.version for locked in wanted(read_spec(path), path.parent)}
    assert {"vllm", "lmcache", "nixl", "snakemake", "duckdb", "orjson", "httptools", "pysimdjson"} <= set(
        found
    )
    # There already, and large; or for another system.
    assert not {"torch", "numpy", "pandas", "pyarrow", "pyreadline3", "cffi"} & set(found)
    # The workflow and the engines share an interpreter, so that both locks must name one version.
    assert found["pydantic"] == "2.14.4"
