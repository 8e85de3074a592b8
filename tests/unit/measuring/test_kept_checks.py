# SPDX-License-Identifier: Apache-2.0
"""Every check on cells at and around each of its limits, kept as a whole: a changed limit, sign or figure shows here.

What a check should say follows from the tests beside this one; here it is only kept. Made again with
`python tests/unit/measuring/test_kept_checks.py`, and then read.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from made_up import CLOCK_S, bench, engine, evidence, pd, watched

from splitbench.measuring import logs, metrics, symmetry
from splitbench.measuring.checks import all_checks, worst
from splitbench.measuring.evidence import EngineEvidence, Evidence, Series
from splitbench.measuring.floor import Floor
from splitbench.measuring.logs import EngineLog
from splitbench.measuring.transfer import BYTES, FAILED, HITS

KEPT = Path(__file__).parents[2] / "fixtures" / "measuring" / "kept.json"
NEEDED = "LMCache hit tokens: {}, need to load: {}"
RETRIEVED = "[req_id={}] Retrieved {} out of 64"


def spaced(gap_s: float, requests: int = 40, latency_s: float = 0.5) -> dict[str, Any]:
    starts = [CLOCK_S + 1 + gap_s * index for index in range(requests)]
    return bench(requests, start_times=starts, latencies=[latency_s] * requests)


def counted(role: str, **counters: float) -> EngineEvidence:
    base = engine(role)
    return replace(base, after={**base.after, **{name.replace("__", ":"): n for name, n in counters.items()}})


def decoder(moved: float, computed: float, more: dict[str, float]) -> Evidence:
    whole = pd(moved, computed)
    one = whole.engines["decode-0"]
    return replace(whole, engines={**whole.engines, "decode-0": replace(one, after={**one.after, **more})})


def gpu(*masks: int) -> Series:
    return Series(
        "gpu:0", "throttle_reasons", [1.1 + 0.05 * k for k in range(len(masks))], list(map(float, masks))
    )


def host(metric: str, *values: float) -> Series:
    return Series("host", metric, [1.2 + 0.01 * k for k in range(len(values))], list(values))


def loop(ticks: float, middle: float, tail: float) -> dict[str, float]:
    return {"ticks": ticks, "p50_ms": middle, "p99_ms": tail}


def by_log(*lines: str, **more: Any) -> Evidence:
    log = EngineLog("decode", "", "\n".join(lines))
    return replace(pd(0, 0), connector="lmcache", logs={"decode-0": log}, **more)


def cells() -> dict[str, Evidence]:
    found = {
        "sound": evidence(),
        "sound pd": pd(512, 8),
        "failed": evidence(bench=bench(errors=["a\nlast line " + "x" * 300, *[""] * 6, "b"])),
        "few": evidence(prompts=9),
        "all failed": evidence(bench=bench(errors=["x"] * 8)),
        "own lengths": evidence(exact_lengths=False),
        "an empty answer": evidence(exact_lengths=False, bench=bench(output_lens=[0] + [16] * 7)),
        "a length of one": evidence(
            exact_lengths=False, bench=bench(output_lens=[1] * 8, input_lens=[1] * 8)
        ),
        "one at once": evidence(concurrency=None, warmups=1),
        "none at once": evidence(concurrency=None, warmups=0),
        "warm-ups": evidence(warmups=3),
        "ramped": evidence(ramped=True),
        "no start times": evidence(bench=bench(start_times=None)),
        "start times of zero": evidence(bench=bench(start_times=[0.0] * 8)),
        "as many as the cap": evidence(bench=bench(4), prompts=4),
        "all at once": evidence(bench=bench(start_times=[CLOCK_S + 1] * 8)),
        "unwatched": evidence(series=(), client_loop=None),
        "no loop": evidence(client_loop=None),
        "no clock": evidence(clock_start_s=None),
        "foreign": evidence(foreign=["a stranger's process"]),
        "no logs": evidence(logs={}),
        "no percentile": evidence(percentiles=()),
        "pooled": evidence(percentiles=(50.0, 90.0, 99.0), pooled_cells=5),
        "near the floor": evidence(floor=Floor(4, 3.1, 3.0)),
        "above the floor": evidence(floor=Floor(4, 3.0, 3.0)),
        "hits without counts": evidence(engines={"e": EngineEvidence("aggregated", {}, {})}),
        "shared": evidence(engines={"e": engine("aggregated", hits=256)}, shared_percent=49.0),
        "shared enough": evidence(engines={"e": engine("aggregated", hits=256)}, shared_percent=49.5),
        "guests": evidence(engines={"e": counted("aggregated", vllm__request_success_total=9)}),
        "no guests": evidence(engines={"e": counted("aggregated", vllm__request_success_total=8)}),
        "preempted": evidence(engines={"e": counted("aggregated", vllm__num_preemptions_total=2)}),
        "smoke": pd(512, 8),
        "unasked": replace(pd(512, 8), smoke=None),
        "bytes": decoder(512, 8, {BYTES: 0.0, HITS: 512.0}),
        "bytes moved": decoder(512, 8, {BYTES: 9.0, FAILED: 2.0}),
        "hits": decoder(100, 400, {HITS: 500.0}),
        "fewer hits": decoder(100, 400, {HITS: 498.0}),
        "chunks": replace(pd(0, 512), chunk_tokens=128),
        "chunks moved": replace(pd(500, 12), chunk_tokens=16),
        "no decoder's log": replace(by_log(), logs={}),
        "retrieved": by_log(*(RETRIEVED.format(k, 63) for k in range(8))),
        "retrieved twice": by_log(
            *(RETRIEVED.format(k % 4, 63 + k) for k in range(8)), "Retrieved 300 out of 300"
        ),
        "found": by_log(*(NEEDED.format(64, 63) for _ in range(8)), RETRIEVED.format(1, 63)),
        "found little": by_log(*(NEEDED.format(60, -1) for _ in range(8))),
    }
    for off in (64, 63, 65, 60):
        found[f"inputs of {off}"] = evidence(bench=bench(input_lens=[off] * 8))
    found["inputs off a little"] = evidence(input_tokens=200, bench=bench(input_lens=[201] * 8))
    found["inputs off more"] = evidence(input_tokens=199, bench=bench(input_lens=[200] * 8))
    for ragged in (0, 1, 2, 5, 6):
        short = [[0.012] * 14] * ragged + [[0.012] * 15] * (100 - ragged)
        found[f"{ragged} ragged"] = evidence(prompts=100, bench=bench(100, itls=short))
    for tiny in (0.0001, 0.0002, 0.00121, 0.0012):
        found[f"gaps of {tiny}"] = evidence(bench=bench(itls=[[0.012] * 14 + [tiny]] * 8))
    for gap_s in (0.1, 0.125, 0.13, 0.1316, 0.14, 0.5):
        found[f"every {gap_s}"] = evidence(prompts=40, bench=spaced(gap_s))
        found[f"rate, every {gap_s}"] = evidence(prompts=40, bench=spaced(gap_s), request_rate=8.0)
        found[f"rate of few, every {gap_s}"] = evidence(prompts=3, bench=spaced(gap_s, 3), request_rate=8.0)
    found["rate of one"] = evidence(prompts=1, bench=spaced(0.1, 1), request_rate=8.0)
    for busy in (89.9, 90.0, 90.1):
        found[f"client at {busy}"] = evidence(
            series=watched(Series("client", "cpu_percent", [0.5, 1.2, 9e9], [100.0, busy, 100.0]))
        )
    for late in (loop(20, 3.0, 5.1), loop(20, 3.01, 1), loop(19, 9, 9), loop(20, 1, 5.0), loop(20, 1, 2.9)):
        found[f"late {late}"] = evidence(client_loop=late)
    for steal in (4.9, 5.0, 5.2):
        found[f"steal {steal}"] = evidence(series=watched(host("steal_percent", steal, steal)))
    for others in (24.0, 25.0, 27.0):
        found[f"others {others}"] = evidence(series=watched(host("others_cpu_percent", others, others)))
        found[f"others {others} beside GPUs"] = evidence(
            series=watched(host("others_cpu_percent", others)), on_gpus=True
        )
    for masks in (
        (0,),
        (0x08, 0),
        (0x20,),
        (0x40, 0x44),
        (0x80,),
        (0x10, 0x01),
        (4, *[0] * 19),
        (4, *[0] * 18),
    ):
        found[f"GPU {masks}"] = evidence(series=watched(gpu(*masks)), on_gpus=True)
    for stated in ("tcp,shm,self", "tcp", "sm", "all", "", "^tcp", "^sm", "cuda,tcp", "rc_x"):
        found[f"transport {stated}"] = replace(pd(512, 8), transports={"decode-0": stated})
    said = "ucp_context_0 intra-node cfg#1 rma(cuda_ipc/cuda posix/memory) am(rc_mlx5/mlx5_0:1)"
    for stated in ("cuda,sm,rc", "cuda_ipc", "^ib", "^cuda"):
        log = {"decode-0": EngineLog("decode", said, "")}
        found[f"GPU transport {stated}"] = replace(pd(512, 8), transports={"decode-0": stated}, logs=log)
    found["silent transport"] = replace(pd(512, 8), logs={"decode-0": EngineLog("decode", "", "tcp")})
    return found


def of_metrics() -> list[Any]:
    page = '# x\na 1\nb{c="1",d="x y"} 2.5 99\nb{c="2"} 3\nb{c="1"} NaN\nbad\n} 1\na:b 1e3\n'
    found = metrics.parse_metrics(page)
    return [
        found,
        metrics.total(found, "b"),
        metrics.total(found, "b", c="1"),
        metrics.total(found, "none"),
        metrics.growth({"a": 0.25}, found, "a"),
        metrics.growth({}, found, "b", c="2"),
        metrics.growth(found, {}, "a"),
        metrics.labels_of('b{c="1",d="x \\"y"}'),
    ]


def of_symmetry() -> list[Any]:
    same = {"dtype": "bf16", "enforce_eager": True, "kv_cache_tokens": 100}
    arms = [
        {"a": {"e": same}, "b": {"e": same | {"kv_cache_tokens": size}, "f": {"kv_cache_tokens": None}}}
        for size in (100, 124, 125, 126, 80, 79)
    ]
    arms += [{"a": {"e": same}, "b": {"e": {"dtype": other}}, "c": {}} for other in ("bf16", "f16", None)]
    arms += [{"a": {}, "b": {}}, {"a": {"e": same, "f": {"dtype": "f16"}}, "b": {"e": same}}]
    return [symmetry.symmetry(each).as_dict() for each in arms] + [
        [difference.reason for difference in symmetry.differences(each)] for each in arms
    ]


def of_logs(tmp: Path) -> list[Any]:
    path = tmp / "log"
    path.write_bytes(b"0123456789" * 10)
    before = logs.PART_LIMIT_BYTES
    logs.PART_LIMIT_BYTES = 20
    try:
        parts = [logs.read_part(path, *ends) for ends in ((0, 20), (5, 26), (0, 100), (90, 50), (95, 200))]
    finally:
        logs.PART_LIMIT_BYTES = before
    stamps = [f"[2026-01-01 00:00:0{k},500] LMCache hit tokens: 5, need to load: {k}" for k in range(4)]
    return [
        parts,
        logs.size_of(path),
        logs.size_of(tmp / "none"),
        logs.read_part(tmp / "none", 0, 5),
        [logs._stamp_s(line) is None for line in (*stamps, "x", "[2026-99-01 00:00:00,500]")],
        (logs._stamp_s(stamps[1]) or 0) - (logs._stamp_s(stamps[0].replace(",500", ",250")) or 0),
        vars(logs.lmcache_loads("\n".join([*stamps, "Retrieved 7 out of 9", RETRIEVED.format("a", 3)]))),
    ]


def made(tmp: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in cells().items():
        checks = all_checks(cell)
        found[name] = {
            check.name: [check.verdict, check.reason, check.figures, check.limits] for check in checks
        }
        found[name]["worst"] = worst(checks)
    sound = found["sound"]
    # Of each cell only where it is not the sound one.
    for name, checks in found.items():
        if name != "sound":
            found[name] = {key: value for key, value in checks.items() if value != sound.get(key)}
    return found | {"metrics": of_metrics(), "symmetry": of_symmetry(), "logs": of_logs(tmp)}


def test_checks_say_what_was_kept(tmp_path: Path) -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    found = json.loads(json.dumps(made(tmp_path)))
    assert {name: value for name, value in found.items() if value != kept.get(name)} == {}
    assert kept.keys() == found.keys()


if __name__ == "__main__":
    import tempfile

    KEPT.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(made(Path(folder)), indent=1, sort_keys=True, ensure_ascii=False)
    KEPT.write_text(text + "\n", encoding="utf-8")
