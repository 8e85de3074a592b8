# SPDX-License-Identifier: Apache-2.0
"""A small copy of a GPU experiment that runs on CPU cores: python rehearsal.py CONFIG SERVING_PYTHON OUT

Same layouts, workloads and cells by name, a hundredth of the work: one core per engine, NixlConnector in place of
LMCache (which does not run on CPU), a small model, inputs of a few dozen tokens.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

MODEL = {
    "hidden_size": 128,
    "layers": 2,
    "heads": 2,
    "kv_heads": 2,
    "intermediate_size": 256,
    "max_model_len": 1024,
}
ENGINE = {
    "startup_limit_s": 300,
    "args": {
        "dtype": "float32",
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "max-model-len": 1024,
    },
    "env": {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
    },
}


def small(config: dict[str, Any], python: Path) -> dict[str, Any]:
    """The experiment for the CPU."""
    program = "import importlib.metadata as m; print(m.version('vllm'))"
    version = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True)
    layouts: dict[str, Any] = {}
    for name, layout in config["layouts"].items():
        if layout["kind"] == "aggregated":
            layouts[name] = {"kind": "aggregated", "cores": [0, 1]}
        else:
            layouts[name] = {
                "kind": "pd",
                "connector": "nixl",
                "prefill": {"cores": [0]},
                "decode": {"cores": [1]},
            }
    workloads = {
        name: {
            "input_tokens": workload["input_tokens"] // 32,
            "output_tokens": workload["output_tokens"] // 16,
            "prompts": {"per_concurrency": 1, "minimum": 4},
        }
        for name, workload in config["workloads"].items()
    }
    return config | {
        "experiment": f"{config['experiment']}-rehearsal",
        "stack": {"name": "cpu", "python": str(python), "packages": {"vllm": version.stdout.strip()}},
        "model": {"name": "tiny-llama", "synthetic": MODEL},
        "engine": ENGINE,
        "layouts": layouts,
        "workloads": workloads,
    }


if __name__ == "__main__":
    given = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[3]).write_text(
        yaml.safe_dump(small(given, Path(sys.argv[2])), sort_keys=False), encoding="utf-8"
    )
