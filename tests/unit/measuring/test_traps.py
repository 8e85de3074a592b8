# SPDX-License-Identifier: Apache-2.0
"""Each way in which a benchmark of PD disaggregation is known to have fooled somebody, rebuilt and caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from made_up import bench, engine, evidence, pd, watched

from splitbench.measuring.checks import Check, all_checks
from splitbench.measuring.evidence import Evidence, Series
from splitbench.measuring.logs import EngineLog
from splitbench.measuring.symmetry import symmetry
from splitbench.tables.ingest import ingest_cell

LOGS = Path(__file__).parents[3] / "tests" / "fixtures" / "logs"


def counted(cell: Evidence, **counters: float) -> Evidence:
    """The cell with counters of its decoder (or only engine) grown by this much."""
    one = list(cell.engines.values())[-1]
    for name, value in counters.items():
        one.before[f"vllm:{name}_total"] = 3.0
        one.after[f"vllm:{name}_total"] = 3.0 + value
    return cell


def lmcache_cell(log: str, **changes: Any) -> Evidence:
    """A PD cell over LMCache with this decoder's log; by vLLM's counters everything came from outside."""
    sound = pd(512, 0)
    return evidence(
        kind="pd",
        connector="lmcache",
        engines=sound.engines,
        logs={"decode-0": EngineLog("decode", "", log)},
        smoke=sound.smoke,
        **changes,
    )


NEVER_LOADED = (LOGS / "lmcache_hits_never_retrieved.log").read_text(encoding="utf-8")
DEGRADED = (LOGS / "lmcache_degraded_mode.log").read_text(encoding="utf-8")
MISS = "\n".join(
    f"LMCache INFO: Reqid: r{n}, Total tokens 64, LMCache hit tokens: 0, need to load: 0" for n in range(8)
)

TRAPS: dict[str, tuple[Evidence, str, str, str]] = {
    # https://github.com/vllm-project/vllm/issues/54227: the same seed twice, and the second run finds all prompts.
    "a fixed seed warms the cache": (
        evidence(engines={"e": engine("aggregated", queries=512, hits=496)}),
        "fresh-prompts", "invalid", "96.9 % of prompt tokens came from the prefix cache",
    ),
    "warm-up prompts are measured again": (
        evidence(warmup_seed_differs=False), "warm-up", "invalid", "among the measured",
    ),
    # https://github.com/LMCache/LMCache/issues/1547
    "the decoder misses although the prefiller has sent": (
        lmcache_cell(MISS), "kv-moved", "invalid", "retrieved only 0.0 %",
    ),
    "the same, by vLLM's counters": (pd(0, 512), "kv-moved", "invalid", "loaded only 0.0 %"),
    # https://github.com/vllm-project/vllm/issues/52617
    "the decoder hits but never loads": (
        lmcache_cell(NEVER_LOADED, bench=bench(100, input_lens=[1024] * 100)),
        "kv-moved", "invalid", "a hit is not a load",
    ),
    "the same, in its log": (
        lmcache_cell(NEVER_LOADED), "server-log", "invalid", "lmcache-never-loaded",
    ),
    "the same, by vLLM's counters of hits": (
        counted(pd(0, 8), external_prefix_cache_hits=512),
        "kv-moved", "invalid", "hit 512 prompt tokens but loaded only 0",
    ),
    # https://github.com/vllm-project/vllm/issues/27485
    "a chunk holds several tokens": (
        evidence(bench=bench(itls=[[0.024] * 8] * 8)), "coalescing", "invalid", "chunks with several tokens",
    ),
    "all requests failed and the summary reads 0": (
        evidence(bench=bench(errors=["Bad Gateway"] * 8, output_lens=[0] * 8, itls=[[]] * 8, ttfts=[0.0] * 8)),
        "completion", "invalid", "8 of 8 requests failed: Bad Gateway",
    ),
    "one output token per request": (
        evidence(bench=bench(output_lens=[1] * 8, itls=[[]] * 8)), "tokens", "invalid", "8 of 8 requests made another",
    ),
    # https://github.com/vllm-project/vllm/pull/24937
    "input of 8,179 instead of 8,192 tokens": (
        evidence(input_tokens=8192, bench=bench(input_lens=[8179] * 8)), "tokens", "warn", "off by up to 0.16 %",
    ),
    "LMCache in degraded mode after a failed start": (
        evidence(logs={"prefill-0": EngineLog("prefill", DEGRADED, "")}), "server-log", "invalid", "lmcache-degraded",
    ),
    "the proxy loses a token": (
        evidence(bench=bench(output_lens=[15] * 8, itls=[[0.012] * 14] * 8, input_lens=[65] * 8)),
        "tokens", "invalid", "8 of 8 requests made another number of tokens than 16",
    ),
    "a throttled GPU": (
        evidence(on_gpus=True, series=watched(Series("gpu:0", "throttle_reasons", [1.2], [float(0x40)]))),
        "machine", "invalid", "gpu:0 was throttled (hardware thermal slowdown)",
    ),
    "two cells at once on one engine": (
        counted(evidence(engines={"e": engine("aggregated")}), request_success=16),
        "load", "invalid", "engines served 16 requests, the client sent 8",
    ),
    "answers that are not the model's": (
        evidence(
            kind="pd",
            engines=pd(512, 0).engines,
            smoke={"same-answers": {"verdict": "invalid", "reason": "3 of 3 answers differ", "figures": {}}},
        ),
        "same-answers", "invalid", "3 of 3 answers differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_the_trap_is_caught(trap: str) -> None:
    cell, name, verdict, words = TRAPS[trap]
    found: dict[str, Check] = {check.name: check for check in all_checks(cell)}
    assert found[name].verdict == verdict, found[name]
    assert words in found[name].reason


def test_eager_in_one_arm_only_is_said() -> None:
    found = symmetry({"agg": {"e": {"enforce_eager": True}}, "pd": {"p": {"enforce_eager": False}}})
    assert (found.verdict, found.reason) == ("warn", "enforce_eager: agg true, pd false")


def test_failed_requests_with_ttft_0_are_no_latency(tmp_path: Path) -> None:
    made: dict[str, Any] = bench(
        errors=["", "x"] * 4,
        ttfts=[0.1, 0.0] * 4,
        itls=[[0.01] * 15, []] * 4,
        output_lens=[16, 0] * 4,
        latencies=[0.25, 0.0] * 4,
    )
    raw = tmp_path / "bench.json"
    raw.write_text(json.dumps(made | {"completed": 4, "duration": 1.0}), encoding="utf-8")
    ingest_cell(raw, {"cell_id": "a-00000000/w-00000000/c4/0-0", "concurrency": 4}, tmp_path / "part")
    requests = pq.read_table(tmp_path / "part" / "requests.parquet").to_pandas()
    assert requests[~requests["ok"]]["ttft_ms"].isna().all()
    assert set(requests[requests["ok"]]["ttft_ms"].round(6)) == {100.0}
