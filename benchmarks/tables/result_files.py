# SPDX-License-Identifier: Apache-2.0
"""Result files for the benchmarks: the client's shape and number format, of any size, from a fixed seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def write_result(path: Path, megabytes: float, output_tokens: int = 1024, seed: int = 1) -> int:
    """Write a detailed `vllm bench serve` result of about this size; give the number of ITLs.

    The numbers are differences of a nanosecond clock's doubles, as the client computes them: their texts
    have the same length and digits as real ones.
    """
    rng = np.random.default_rng(seed)
    requests = max(1, round(megabytes * 1e6 / (22.2 * output_tokens)))
    with path.open("w", encoding="ascii") as out:
        head = {
            "date": "20260101-000000",
            "endpoint_type": "openai",
            "backend": "openai",
            "label": None,
            "model_id": "m",
            "tokenizer_id": "m",
            "num_prompts": requests,
            "request_rate": "inf",
            "burstiness": 1.0,
            "max_concurrency": 32,
            "duration": 100.0,
            "completed": requests,
            "failed": 0,
            "total_input_tokens": 8192 * requests,
            "total_output_tokens": output_tokens * requests,
            "request_throughput": 1.0,
            "input_lens": [8192] * requests,
            "output_lens": [output_tokens] * requests,
            "ttfts": (rng.gamma(4, 0.1, requests) + 0.05).tolist(),
        }
        out.write(json.dumps(head)[:-1] + ', "itls": [')
        for k in range(requests):
            gaps = rng.gamma(30, 0.0003, output_tokens - 1) + 0.05 * (rng.random(output_tokens - 1) < 0.01)
            clock = np.round(np.cumsum(gaps) + 1000 * rng.random() + 20000, 9)
            out.write((", " if k else "") + json.dumps(np.diff(clock, prepend=clock[0] - gaps[0]).tolist()))
        tail = {
            "start_times": np.sort(rng.random(requests) * 100).tolist(),
            "generated_texts": [""] * requests,
            "errors": [""] * requests,
            "p99_itl_ms": 12.5,
        }
        out.write("], " + json.dumps(tail)[1:])
    return requests * (output_tokens - 1)
