# SPDX-License-Identifier: Apache-2.0
"""Run by the serving environment's own Python: does what matters import, and what is installed?

Writes one JSON object to the path in its first argument. It imports what engines and the benchmark client
import, with bytecode writing on, so that the first engine does not spend its start on compiling (14 s on 2
cores). Standard library only, besides what it probes. Usage: python -I serving_probe.py OUT
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path

# Without these no engine, no client and no KV transfer can run.
NEEDED = (
    "torch",
    "vllm",
    "vllm.entrypoints.cli.main",
    "vllm.benchmarks.serve",
    "vllm.entrypoints.openai.api_server",
)
# Loaded by engine processes; their names move between versions, so that a missing one is no fault.
USUAL = (
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
)


def installed() -> dict[str, str]:
    """Name (normalised) to version of every distribution in this environment."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found[name.lower().replace("_", "-").replace(".", "-")] = distribution.version
    return dict(sorted(found.items()))


def record_digest(name: str) -> str:
    """sha256 of a distribution's RECORD, which holds a hash of every installed file; "" where it has none."""
    text = importlib.metadata.distribution(name).read_text("RECORD")
    # Bytecode has no hash, scripts hold the path of this environment, metadata names the installer: not the
    # wheel's.
    lines = sorted(
        line
        for line in (text or "").splitlines()
        if not line.endswith(",,") and not line.startswith("../") and ".dist-info/" not in line
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""


def main() -> None:
    started = time.monotonic()
    packages = installed()
    for name in NEEDED:
        importlib.import_module(name)
    for name in USUAL:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "nixl" in packages:  # after vLLM, which sets UCX's variables before it loads NIXL
        importlib.import_module("nixl._api")
    platforms = importlib.import_module("vllm.platforms")
    Path(sys.argv[1]).write_text(
        json.dumps(
            {
                "packages": packages,
                "python": platform.python_version(),
                "platform": platform.platform(),
                "device": platforms.current_platform.device_type,
                "torch_record_sha256": record_digest("torch"),
                "import_s": round(time.monotonic() - started, 3),
            }
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
