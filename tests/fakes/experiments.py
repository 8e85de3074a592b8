# SPDX-License-Identifier: Apache-2.0
"""A small config with every kind of layout, for tests of what is read, keyed and rendered from it."""

from __future__ import annotations

import copy
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

DELETE = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good config with one value changed; DELETE removes it."""
    config = copy.deepcopy(GOOD)
    *parents, last = path.split("/")
    place: Any = config
    for part in parents:
        place = place[int(part) if isinstance(place, list) else part]
    key: Any = int(last) if isinstance(place, list) else last
    if value is DELETE:
        del place[key]
    else:
        place[key] = value
    return config
