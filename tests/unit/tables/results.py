# SPDX-License-Identifier: Apache-2.0
"""Results as the client writes them, small, with the peculiarities of real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def detailed(requests: int = 8, tokens: int = 16, seed: int = 1) -> dict[str, Any]:
    """A result with --save-detailed in which everything is right."""
    rng = np.random.default_rng(seed)
    ttfts = np.round(0.08 + 0.04 * rng.random(requests), 9)
    itls = [np.round(0.011 + 0.003 * rng.random(tokens - 1), 9).tolist() for _ in range(requests)]
    return {
        "date": "20260101-000000",
        "endpoint_type": "openai",
        "backend": "openai",
        "label": None,
        "model_id": "m",
        "num_prompts": requests,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 4,
        "duration": 0.58,
        "completed": requests,
        "failed": 0,
        "total_input_tokens": 64 * requests,
        "total_output_tokens": tokens * requests,
        "request_throughput": 1.0,
        "request_goodput": None,
        "input_lens": [64] * requests,
        "output_lens": [tokens] * requests,
        "ttfts": ttfts.tolist(),
        "itls": itls,
        "latencies": [t + sum(g) for t, g in zip(ttfts.tolist(), itls, strict=True)],
        "start_times": (1000 + 0.3 * np.arange(requests)).tolist(),
        "generated_texts": ['he said "]]}" \\ \n'] * requests,
        "errors": [""] * requests,
        "max_concurrent_requests": 4,
    }


def with_failures(result: dict[str, Any], *which: int) -> dict[str, Any]:
    """The same with these requests failed, as the client records a failure."""
    for k in which:
        result["ttfts"][k] = 0.0
        result["itls"][k] = []
        result["output_lens"][k] = 0
        result["errors"][k] = "Traceback: ServerDisconnectedError"
    result["completed"] -= len(which)
    result["failed"] += len(which)
    return result


def save(path: Path, *results: Any, **options: Any) -> Path:
    """Write results as the client does: one, or several separated by line ends."""
    path.write_text("\n".join(json.dumps(r, **options) for r in results), encoding="utf-8")
    return path
