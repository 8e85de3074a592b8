# SPDX-License-Identifier: Apache-2.0
"""`splitbench init`: an experiment to start from, written for the machine at hand."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

from splitbench.environment.probe import fingerprint
from splitbench.errors import UserError
from splitbench.experiment.load import load_experiment
from splitbench.files import write_text

# The demo's model: 32 million parameters, decode steps of 10 ms and more on one core.
_SYNTHETIC = (
    "{hidden_size: 384, layers: 4, heads: 6, kv_heads: 6, intermediate_size: 1024, max_model_len: 1024}"
)
_DEFAULT_HUB = "Qwen/Qwen3-8B"
_ASK_VERSIONS = """\
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("vllm", "nixl"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def starter(
    name: str, schema: str, *, gpus: int, cores: Sequence[int], python: Path, model: str | None
) -> str:
    """The text of an experiment with comments.

    Args:
        name: the experiment's name.
        schema: path of the JSON Schema as seen from the file.
        gpus: how many GPUs to use; 0: run on cores.
        cores: the cores that may be used.
        python: interpreter of the serving environment, for GPUs.
        model: hub id or folder; None: a default.

    Raises:
        UserError: the machine can't hold two engines.
    """
    on_gpus = gpus > 0
    stack = _gpu_stack(python) if on_gpus else _core_stack()
    served = _model(model) if on_gpus or model else _synthetic_model()
    layouts = _gpu_layouts(gpus) if on_gpus else _core_layouts(cores)
    machine = f"{gpus} GPU{'s' if gpus > 1 else ''}" if on_gpus else f"{len(cores)} usable cores"
    return f"""\
# yaml-language-server: $schema={schema}
# SPDX-License-Identifier: Apache-2.0
# Written by `splitbench init` for a machine with {machine}. Every key: `splitbench config explain KEY`.
experiment: {name}
title: Does prefill-decode disaggregation pay off here?
seed: 1    # of prompts and of the order of cells; another seed is another experiment

{stack}
{served}
engine:
  startup_limit_s: {1800 if on_gpus else 300}
  args:
    # Each cell draws its own prompts, so a prefix cache could only blur the comparison.
    enable-prefix-caching: false
{"" if on_gpus else _CORE_ENGINE}
# The arms. Compare within a budget: layouts that occupy the same number of {"GPUs" if on_gpus else "cores"}.
{layouts}
# Lengths of your own traffic belong here. Every workload is measured at every load on every layout.
workloads:
{_gpu_workloads() if on_gpus else _core_workloads()}
# Closed loop: so many requests are always in flight. P99 takes 368 requests, P90 takes 36: a number that its sample
# can't support is printed as a bound. For a verdict you can defend: restarts: 2 and repeats: 3 or more.
matrix:
  concurrency: {"[1, 2, 4, 8, 16, 32]" if on_gpus else "[1, 2, 4, 8]"}
  restarts: 1
  repeats: 1

# What your users must get: gaps between tokens, and the percentile that has to keep to it.
slo: {{itl_ms: {50 if on_gpus else 100}, percentile: 99}}
"""


_CORE_ENGINE = """\
    dtype: float32
    enforce-eager: true
  env:
    VLLM_CPU_KVCACHE_SPACE: "1"    # GiB for each engine
    # Fewer processes and no spinning threads: client, proxy and engines share these cores.
    VLLM_ENABLE_V1_MULTIPROCESSING: "0"
    OMP_WAIT_POLICY: PASSIVE
    VLLM_LOG_STATS_INTERVAL: "3600"
"""


def _core_stack() -> str:
    return """\
# Built by the workflow from the lock, on the first run.
stack:
  name: cpu
  lock: envs/serving-cpu.lock
  expects: config/stacks/cpu.yaml    # what the machine is checked against before the first cell
"""


def _gpu_stack(python: Path) -> str:
    versions = installed_versions(python)
    if not versions.get("vllm"):
        return """\
# Built by the workflow from the lock, on the first run (CUDA 13). An environment of your own: --serving-python.
stack:
  name: cuda
  lock: envs/serving-cuda.lock
"""
    packages = ", ".join(f"{name}: {json.dumps(version)}" for name, version in versions.items())
    return f"""\
# A serving environment that is there already, and the versions found in it: results are keyed by them.
stack:
  name: cuda
  python: {python}
  packages: {{{packages}}}
"""


def installed_versions(python: Path) -> dict[str, str]:
    """Versions of vLLM and NIXL that an interpreter finds; empty where it can't be asked."""
    try:
        asked = subprocess.run(
            [str(python), "-c", _ASK_VERSIONS], capture_output=True, text=True, timeout=60, check=True
        )
        return {str(name): str(version) for name, version in json.loads(asked.stdout).items()}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def _model(model: str | None) -> str:
    chosen = model or _DEFAULT_HUB
    note = "" if model else "# EDIT: your model, as `hub: owner/name` or as `path: folder`.\n"
    key = "path" if Path(chosen).is_dir() else "hub"
    name = Path(chosen).name.lower()
    return f"{note}model:\n  name: {name}\n  {key}: {chosen}\n"


def _synthetic_model() -> str:
    return f"""\
# Random weights, made here; answers mean nothing, latencies do. Your own: `path: folder` or `hub: owner/name` instead.
model:
  name: tiny-llama
  synthetic: {_SYNTHETIC}
"""


def _gpu_layouts(gpus: int) -> str:
    if gpus == 1:
        shared = "{gpus: [0], share: {mps_percent: 50}, memory_share: 0.42}"
        return f"""\
# Budget: 1 GPU. Two engines share it by CUDA MPS, half of its compute units and a part of its memory each.
layouts:
  agg-1gpu: {{kind: aggregated, gpus: [0]}}
  pd-1gpu: {{kind: pd, connector: nixl, prefill: {shared}, decode: {shared}}}
"""
    lines = ["layouts:"]
    # Tensor parallel sizes are powers of two: attention heads must divide among the ranks.
    half = 1
    while 4 * half <= gpus:
        half *= 2
    sizes = sorted({half, max(1, half // 2)})
    for size in sizes:
        both, left, right = list(range(2 * size)), list(range(size)), list(range(size, 2 * size))
        lines += [
            f"  # Budget: {2 * size} GPUs.",
            f"  agg-tp{2 * size}: {{kind: aggregated, gpus: {both}}}",
            f"  2x-agg-tp{size}: {{kind: replicas, replicas: [{{gpus: {left}}}, {{gpus: {right}}}]}}",
            f"  pd-tp{size}: {{kind: pd, connector: nixl, prefill: {{gpus: {left}}}, decode: {{gpus: {right}}}}}",
        ]
    return "\n".join(lines) + "\n"


def _core_layouts(cores: Sequence[int]) -> str:
    if len(cores) < 2:
        raise UserError(
            "one usable core holds one engine, and there is nothing to compare",
            mend="use a machine with two cores or more, or say --gpus N for the one it will run on",
        )
    # From four cores up one is left to client and proxy; engines that wait for them would be measured, not engines.
    half = len(cores) // 2 if len(cores) < 4 else (len(cores) - 1) // 2
    left, right = list(cores[:half]), list(cores[half : 2 * half])
    note = "client and proxy share them" if len(cores) < 4 else "the others are for client and proxy"
    return f"""\
# Budget: {2 * half} cores ({note}).
layouts:
  agg-{2 * half}core: {{kind: aggregated, cores: {left + right}}}
  2x-agg-{half}core: {{kind: replicas, replicas: [{{cores: {left}}}, {{cores: {right}}}]}}
  pd-{half}+{half}core: {{kind: pd, connector: nixl, prefill: {{cores: {left}}}, decode: {{cores: {right}}}}}
"""


def _gpu_workloads() -> str:
    return """\
  8k-1k: {input_tokens: 8192, output_tokens: 1024, prompts: {per_concurrency: 10, minimum: 40}}    # long prompts
  1k-1k: {input_tokens: 1024, output_tokens: 1024, prompts: {per_concurrency: 10, minimum: 40}}    # even
"""


def _core_workloads() -> str:
    return """\
  long: {input_tokens: 768, output_tokens: 32, prompts: {per_concurrency: 10, minimum: 16}}
  short: {input_tokens: 64, output_tokens: 32, prompts: {per_concurrency: 10, minimum: 16}}
"""


def write_starter(
    file: Path, *, gpus: int | None, python: Path, model: str | None, schema: Path, force: bool = False
) -> str:
    """Write an experiment for this machine; returns what it was written for, in words.

    Args:
        file: where to; its stem becomes the experiment's name.
        gpus: how many GPUs to plan for; None: as many as this machine has, cores if none.
        python: interpreter of the serving environment, for GPUs.
        model: hub id or folder; None: a default.
        schema: the JSON Schema that editors read.
        force: replace a file that is there.

    Raises:
        UserError: the file exists, its name can't name an experiment, or the machine is too small.
    """
    if file.exists() and not force:
        raise UserError("exists already", where=str(file), mend="name another file, or say --force")
    count = len(fingerprint()["gpus"]) if gpus is None else gpus
    text = starter(
        file.stem,
        Path(os.path.relpath(schema, file.resolve().parent)).as_posix(),
        gpus=count,
        cores=sorted(os.sched_getaffinity(0)),
        python=python,
        model=model,
    )
    load_experiment(yaml.safe_load(text), [file])  # a name that can't be one, before anything is written
    write_text(file, text)
    return f"{count} GPUs" if count else f"{len(os.sched_getaffinity(0))} cores"
