# SPDX-License-Identifier: Apache-2.0
"""Load, client, machine, samples, transport and symmetry: a sound cell and a broken one each."""

from __future__ import annotations

from typing import Any

import pytest
from made_up import CLOCK_S, bench, engine, evidence, pd, watched

from splitbench.measuring import conditions
from splitbench.measuring.checks import Check, all_checks
from splitbench.measuring.evidence import Series
from splitbench.measuring.floor import Floor
from splitbench.measuring.logs import EngineLog
from splitbench.measuring.symmetry import COMPARED, POOL, differences, facts_of, symmetry
from splitbench.serving.fact_rules import RULES


def check(name: str, **changes: Any) -> Check:
    return next(one for one in all_checks(evidence(**changes)) if one.name == name)


# -- load
def spaced(gap_s: float, requests: int = 40, latency_s: float = 0.5) -> dict[str, Any]:
    return bench(
        requests,
        start_times=[CLOCK_S + gap_s * i for i in range(requests)],
        latencies=[latency_s] * requests,
    )


def test_a_closed_loop_keeps_its_cap() -> None:
    sound = check("load")
    assert sound.verdict == "ok"
    assert sound.figures["percent"] > 99


def test_in_flight_is_a_mean_over_time() -> None:
    assert conditions.in_flight([0, 0, 2], [2, 4, 4], 0, 4) == 2.0
    assert conditions.in_flight([-1, 3], [1, 9], 0, 4) == 0.5


def test_older_clients_state_no_latencies() -> None:
    older = bench()
    del older["latencies"]
    assert check("load", bench=older).figures == check("load").figures


def test_a_client_that_dawdles_does_not_reach_the_cap() -> None:
    # One at a time although four are asked for.
    slow = check("load", bench=spaced(0.5), prompts=40)
    assert (slow.verdict, slow.figures["in_flight"]) == ("invalid", 1.0)
    assert "1.00 requests in flight of 4" in slow.reason


@pytest.mark.parametrize(("count", "words"), [(4, "never a second round"), (3, "never a second round")])
def test_without_a_second_round_nothing_is_steady(count: int, words: str) -> None:
    found = check("load", bench=bench(count), prompts=count)
    assert found.verdict == "warn"
    assert words in found.reason


def test_an_open_loop_reaches_its_rate() -> None:
    rate = {"request_rate": 2.0, "concurrency": None, "prompts": 40}
    assert check("load", bench=spaced(0.5), **rate).verdict == "ok"
    assert check("load", bench=spaced(1.0), **rate).verdict == "invalid"
    # 20 requests can miss by chance what 400 can not.
    assert check("load", bench=spaced(0.6, 20), **rate).verdict == "warn"
    assert check("load", bench=spaced(0.6, 400), **rate).verdict == "invalid"


def test_a_load_without_times_or_without_a_steady_rate() -> None:
    assert check("load", bench=bench(start_times=[])).verdict == "warn"
    assert check("load", ramped=True, bench=spaced(1.0)).verdict == "ok"


def test_two_cells_at_once_on_one_engine() -> None:
    def served(count: float) -> Check:
        counted = engine("aggregated")
        counted.before["vllm:request_success_total"] = 5.0
        counted.after["vllm:request_success_total"] = 5.0 + count
        return check("load", engines={"e": counted})

    assert served(8).verdict == "ok"
    assert served(16).verdict == "invalid"
    assert "engines served 16 requests, the client sent 8" in served(16).reason


# -- client
def test_a_client_at_the_limit_of_its_core() -> None:
    busy = Series("client", "cpu_percent", [1.1, 1.2, 1.3], [99.0, 98.0, 97.0])
    assert check("client", series=watched(busy)).verdict == "invalid"
    once = Series("client", "cpu_percent", [1.1], [135.0])  # of a cell of a second or two
    assert check("client", series=watched(once)).verdict == "ok"
    building_prompts = Series("client", "cpu_percent", [0.5, 1.2], [100.0, 40.0])
    assert check("client", series=watched(building_prompts)).verdict == "ok"


def test_a_late_event_loop() -> None:
    assert check("client", client_loop={"ticks": 50, "p50_ms": 4.0, "p99_ms": 9.0}).verdict == "invalid"
    assert check("client", client_loop={"ticks": 50, "p50_ms": 0.2, "p99_ms": 9.0}).verdict == "warn"
    assert check("client", client_loop={"ticks": 50, "p50_ms": 0.2, "p99_ms": 2.0}).verdict == "ok"
    assert check("client", client_loop={"ticks": 5, "p50_ms": 4.0, "p99_ms": 9.0}).verdict == "ok"
    assert check("client", client_loop=None, series=()).verdict == "warn"


def test_itls_near_the_clients_own_noise() -> None:
    assert check("client", floor=Floor(4, 0.2, 2.0)).verdict == "ok"
    blurred = check("client", floor=Floor(4, 4.0, 2.0))
    assert blurred.verdict == "warn"
    assert blurred.reason == "ITLs (median 12.00 ms) are near the measurement floor (4.00 ms)"
    tail = check("client", floor=Floor(4, 0.2, 8.0))
    assert (tail.verdict, tail.figures["floor_p99_ms"]) == ("warn", 8.0)
    assert tail.reason == "ITLs (P99 12.00 ms) are near the measurement floor (8.00 ms)"


# -- machine
def by_series(others: float) -> tuple[Series, ...]:
    return watched(Series("host", "others_cpu_percent", [1.1], [others]))


def test_a_machine_that_others_use() -> None:
    def by(steal: float, others: float, **changes: Any) -> Check:
        taken = (
            Series("host", "steal_percent", [1.1], [steal]),
            Series("host", "others_cpu_percent", [1.1], [others]),
        )
        return check("machine", series=watched(*taken), processors=2, **changes)

    assert [by(steal, 0).verdict for steal in (4.9, 5.1, 24.9, 25.1)] == ["ok", "warn", "warn", "invalid"]
    assert [by(0, others).verdict for others in (9.8, 10.2, 49.8, 50.2)] == ["ok", "warn", "warn", "invalid"]
    both = by(11.4, 28.0)
    assert (both.verdict, both.figures["taken_percent"]) == ("invalid", 25.4)
    assert both.reason.startswith("25 % of 2 processors were taken: other processes used 28 % of a core")
    assert "on_invalid=rerun" in both.reason
    assert "on_invalid" not in by(11.4, 0).reason  # which measures refused cells only
    # A neighbour that fills a core matters less where there are many.
    assert check("machine", series=by_series(100.0), processors=64).verdict == "ok"
    # Engines on GPUs have processors to spare, but not if the machine itself is taken away.
    gpu = Series("gpu:0", "throttle_reasons", [1.2], [0.0])
    assert check("machine", series=(*by_series(100.0), gpu), on_gpus=True, processors=64).verdict == "ok"
    stolen = Series("host", "steal_percent", [1.1], [5.1])
    assert check("machine", series=watched(stolen, gpu), on_gpus=True).verdict == "invalid"
    assert check("machine", on_gpus=True).verdict == "warn"  # GPUs were not watched
    assert check("machine", series=()).verdict == "warn"
    foreign = check("machine", foreign=["GPU 0: process 77 (python) is not ours"])
    assert (foreign.verdict, foreign.reason) == ("invalid", "GPU 0: process 77 (python) is not ours")


def test_a_process_that_was_stopped() -> None:
    stopped = Series("engine:decode-0", "stopped_processes", [1.1, 1.2], [2.0, 2.0])
    found = check("machine", series=watched(stopped))
    assert found.verdict == "invalid"
    assert "engine:decode-0 was stopped in 2 of the samples" in found.reason
    before = Series("engine:decode-0", "stopped_processes", [0.0], [1.0])
    assert check("machine", series=watched(before)).verdict == "ok"


@pytest.mark.parametrize(
    ("mask", "verdict", "words"),
    [
        (0x00, "ok", "nothing throttled"),
        (0x01, "ok", "nothing throttled"),  # idle
        (0x04, "warn", "power limit"),
        (0x20, "invalid", "software thermal slowdown"),
        (0x48, "invalid", "hardware slowdown"),
    ],
)
def test_a_throttled_gpu(mask: int, verdict: str, words: str) -> None:
    gpu = Series("gpu:0", "throttle_reasons", [1.1, 1.2], [0.0, float(mask)])
    found = check("machine", series=watched(gpu), on_gpus=True)
    assert found.verdict == verdict
    assert words in found.reason


# -- logs
def test_logs_decide() -> None:
    degraded = EngineLog("aggregated", "System will operate in degraded mode (recompute).", "")
    found = check("server-log", logs={"e": degraded})
    assert found.verdict == "invalid"
    assert "e: lmcache-degraded (1 times, start)" in found.reason
    assert check("server-log", logs={}).verdict == "warn"
    hybrid = EngineLog("aggregated", "Turning off hybrid kv cache manager because", "")
    assert check("server-log", logs={"e": hybrid}).verdict == "ok"


def test_preemptions_are_counted_where_the_log_is_silent() -> None:
    counted = engine("aggregated")
    counted.before["vllm:num_preemptions_total"] = 2.0
    counted.after["vllm:num_preemptions_total"] = 5.0
    found = check("server-log", engines={"e": counted})
    assert (found.verdict, found.reason) == ("invalid", "3 requests were preempted and computed again")


def test_a_few_missing_loads_warn_and_many_are_invalid() -> None:
    def log(missing: int) -> EngineLog:
        lines = []
        for n in range(200):
            stamp = f"[2026-12-01 03:{n // 60:02d}:{n % 60:02d},000]"
            lines.append(f"{stamp} Reqid: r{n}, Total tokens 9, LMCache hit tokens: 9, need to load: 8 (x)")
            if n >= missing:
                lines.append(f"{stamp} [req_id=r{n}] Retrieved 9 out of 9 required tokens")
        return EngineLog("decode", "", "\n".join(lines))

    assert check("server-log", logs={"d": log(0)}).verdict == "ok"
    assert check("server-log", logs={"d": log(2)}).verdict == "warn"
    assert check("server-log", logs={"d": log(3)}).verdict == "invalid"


# -- samples
def test_percentiles_need_requests() -> None:
    assert check("samples", percentiles=(50.0,)).verdict == "ok"
    few = check("samples", percentiles=(50.0, 99.0))
    assert few.verdict == "warn"
    assert "P99 needs 368" in few.reason
    assert check("samples", percentiles=(99.0,), pooled_cells=46).verdict == "ok"
    assert "samples" not in {one.name for one in all_checks(evidence(percentiles=()))}


# -- transport
@pytest.mark.parametrize(
    ("stated", "seen", "verdict"),
    [
        ("tcp,shm,self", "rma(tcp/lo) am(posix/memory)", "ok"),
        ("cuda_ipc,cuda_copy,tcp", "rma(cuda_ipc/cuda) am(tcp/lo)", "ok"),
        ("cuda_ipc,cuda_copy", "rma(tcp/eth0) am(tcp/eth0)", "invalid"),
        ("rc,cuda_ipc", "rma(rc_mlx5/mlx5_0:1)", "ok"),
        ("^tcp", "rma(tcp/lo)", "invalid"),
        ("^cuda", "rma(tcp/lo)", "ok"),
        ("all", "rma(tcp/lo)", "ok"),
        ("", "rma(tcp/lo)", "ok"),
        ("tcp", "", "warn"),
    ],
)
def test_the_transport_is_the_stated_one(stated: str, seen: str, verdict: str) -> None:
    line = f"UCX INFO ucp_context_0 intra-node cfg#1 {seen}" if seen else ""
    cell = pd(
        512,
        0,
    )
    changed = evidence(
        **{
            **{name: getattr(cell, name) for name in ("kind", "connector", "engines", "smoke")},
            "logs": {"decode-0": EngineLog("decode", line, "")},
            "transports": {"decode-0": stated},
        }
    )
    found = {one.name: one for one in all_checks(changed)}["transport"]
    assert found.verdict == verdict, found.reason


# -- symmetry
AGG = {"engine-0": {"dtype": "bfloat16", "enforce_eager": False, "kv_cache_tokens": 800_000}}


def test_arms_that_differ_in_nothing_else() -> None:
    pd_arm = {
        "prefill-0": {"dtype": "bfloat16", "enforce_eager": False, "kv_cache_tokens": 400_000},
        "decode-0": {"dtype": "bfloat16", "enforce_eager": False, "kv_cache_tokens": 400_000},
    }
    found = symmetry({"agg": AGG, "pd": pd_arm})
    assert (found.verdict, found.reason) == ("ok", "2 settings are the same in agg, pd")


def test_eager_in_one_arm_only() -> None:
    pd_arm = {
        "prefill-0": {"dtype": "bfloat16", "enforce_eager": False},
        "decode-0": {"dtype": "bfloat16", "enforce_eager": True},
    }
    found = symmetry({"agg": AGG, "pd": pd_arm})
    assert found.verdict == "warn"
    assert found.reason == "enforce_eager: agg false, pd false/true"
    (told,) = differences({"agg": AGG, "pd": pd_arm, "mute": {"e": {}}})
    assert (told.layouts, told.fact, told.values) == (("agg", "pd"), "enforce_eager", ("false", "false/true"))


def test_facts_as_sessions_keep_them() -> None:
    entry = {"role": "decode", "devices": [0], "facts": {"dtype": {"value": "bfloat16", "source": "log:3"}}}
    assert facts_of({"format": 1, "engines": {"decode-0": entry}}) == {"decode-0": {"dtype": "bfloat16"}}
    assert set(COMPARED) | {POOL} <= set(RULES)


def test_pools_and_missing_facts() -> None:
    small = {"decode-0": {"dtype": "bfloat16", "kv_cache_tokens": 183_104}}
    found = symmetry({"agg": AGG, "pd": small})
    assert found.reason == "kv_cache_tokens: agg 800,000, pd 183,104"
    assert symmetry({"agg": {"engine-0": {}}, "pd": {"d": {}}}).verdict == "warn"
