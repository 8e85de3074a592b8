# SPDX-License-Identifier: Apache-2.0
"""Made-up cells: a sound one, and changes to it."""

from __future__ import annotations

from typing import Any

from splitbench.measuring.evidence import EngineEvidence, Evidence, Series
from splitbench.measuring.logs import EngineLog

CLOCK_S = 5000.0
SOURCE = "vllm:prompt_tokens_by_source_total"


def bench(requests: int = 8, output: int = 16, gap_s: float = 0.012, **changes: Any) -> dict[str, Any]:
    """A detailed result in which everything is as asked, with changes."""
    latency_s = 0.1 + gap_s * (output - 1)
    return {
        "errors": [""] * requests,
        "input_lens": [64] * requests,
        "output_lens": [output] * requests,
        "itls": [[gap_s] * (output - 1) for _ in range(requests)],
        "ttfts": [0.1] * requests,
        # Four at a time, each wave as soon as the one before is over.
        "start_times": [CLOCK_S + 1 + index // 4 * (latency_s + 0.001) for index in range(requests)],
        "latencies": [latency_s] * requests,
    } | changes


def evidence(**changes: Any) -> Evidence:
    """Evidence of a sound aggregated cell, with changes."""
    fields: dict[str, Any] = {
        "kind": "aggregated",
        "prompts": 8,
        "input_tokens": 64,
        "output_tokens": 16,
        "concurrency": 4,
        "warmups": 4,
        "warmup_seed_differs": True,
        "bench": bench(),
        "engines": {"engine-0": engine("aggregated")},
        "logs": {"engine-0": EngineLog("aggregated", "ready\n", "served\n")},
        "series": watched(),
        "client_loop": {"ticks": 50.0, "p50_ms": 0.1, "p99_ms": 1.0},
        "clock_start_s": CLOCK_S,
        "percentiles": (50.0,),
    }
    return Evidence(**(fields | changes))


def engine(role: str, *, queries: float = 512, hits: float = 0, **sources: float) -> EngineEvidence:
    """An engine that counted these tokens during the cell, on top of what it had."""
    before = {"vllm:prefix_cache_queries_total": 100.0, "vllm:prefix_cache_hits_total": 50.0}
    after = {
        "vllm:prefix_cache_queries_total": 100.0 + queries,
        "vllm:prefix_cache_hits_total": 50.0 + hits,
    }
    for source, count in sources.items():
        series = f'{SOURCE}{{engine="0",source="{source}"}}'
        before[series], after[series] = 7.0, 7.0 + count
    return EngineEvidence(role, before, after)


def pd(moved: float, computed: float, **changes: Any) -> Evidence:
    """A PD cell whose decoder loaded and computed these prompt tokens."""
    decoder = engine("decode", external_kv_transfer=moved, local_compute=computed)
    return evidence(
        kind="pd",
        connector="nixl",
        engines={"prefill-0": engine("prefill"), "decode-0": decoder},
        logs={
            "prefill-0": EngineLog("prefill", "", ""),
            "decode-0": EngineLog("decode", "", "ucp_context_0 intra-node cfg#1 rma(tcp/lo) am(tcp/lo)"),
        },
        transports={"decode-0": "tcp,shm,self"},
        smoke={"same-answers": {"verdict": "ok", "reason": "same", "figures": {}}},
        **changes,
    )


def watched(*more: Series) -> tuple[Series, ...]:
    """Telemetry of a quiet machine, with further series in place of its own of the same name."""
    quiet = [
        Series(
            "client", "cpu_percent", [0.5, 1.2, 2.2], [100.0, 12.0, 11.0]
        ),  # the first one is before any request
        Series("host", "steal_percent", [1.2, 2.2], [0.0, 0.1]),
        Series("host", "others_cpu_percent", [1.2, 2.2], [3.0, 2.0]),
    ]
    replaced = {(one.source, one.metric) for one in more}
    return (*(one for one in quiet if (one.source, one.metric) not in replaced), *more)
