# SPDX-License-Identifier: Apache-2.0
"""A small config with every kind of layout, for tests of what is read, keyed and rendered from it."""

from __future__ import annotations

from typing import Any

GOOD: dict[str, Any] = {
    "experiment": "tiny",
    "stack": {"name": "stub", "python": "bin/python", "packages": {"vllm": "1"}},
    "model": {"name": "m", "synthetic": {}},
    "layouts": {
        "agg": {"kind": "aggregated", "cores": [0, 1]},
        "pd": {"kind": "pd", "connector": "nixl", "prefill": {"cores": [0]}, "decode": {"cores": [1]}},
        "two": {"kind": "replicas", "replicas": [{"cores": [0]}, {"cores": [1]}]},
        "tp": {"kind": "aggregated", "gpus": [0, 1, 2, 3]},
    },
    "workloads": {"long": {"input_tokens": 100, "output_tokens": 8}},
    "matrix": {"concurrency": [1, 2]},
}
