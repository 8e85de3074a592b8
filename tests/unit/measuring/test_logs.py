# SPDX-License-Identifier: Apache-2.0
"""The log scanner on logs of real engines, and on single lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from splitbench.measuring.logs import (
    EngineLog,
    lmcache_loads,
    read_part,
    scan,
    size_of,
    summary,
    ucx_transports,
)
from splitbench.measuring.signatures import SIGNATURES, render

ROOT = Path(__file__).parents[3]
LOGS = ROOT / "tests" / "fixtures" / "logs"


def found(name: str, role: str, *, on_gpus: bool = True) -> dict[str, str]:
    """What counts against an engine with this log, by signature."""
    log = EngineLog(role, (LOGS / name).read_text(encoding="utf-8"), "")
    return {one.signature.id: one.signature.judgement for one in scan("e", log, on_gpus=on_gpus)}


@pytest.mark.parametrize(
    ("name", "role", "expected"),
    [
        ("aggregated_healthy.log", "aggregated", {}),
        ("lmcache_retrieved.log", "decode", {"hybrid-kv-manager-off": "note"}),
        (
            "lmcache_hits_never_retrieved.log",
            "decode",
            {"lmcache-never-loaded": "invalid", "hybrid-kv-manager-off": "note"},
        ),
        (
            "lmcache_degraded_mode.log",
            "prefill",
            {"lmcache-degraded": "invalid", "nixl-backend-error": "invalid", "ucx-no-cuda": "invalid"},
        ),
        (
            "nixl_backend_error.log",
            "prefill",
            {"nixl-backend-error": "invalid", "ucx-no-cuda": "invalid", "engine-died": "invalid"},
        ),
        ("lmcache_illegal_address.log", "prefill", {"illegal-address": "invalid", "engine-died": "invalid"}),
        ("ucx_illegal_address.log", "prefill", {"illegal-address": "invalid"}),
    ],
)
def test_real_logs_are_judged_right(name: str, role: str, expected: dict[str, str]) -> None:
    assert found(name, role) == expected


@pytest.mark.parametrize(
    ("name", "role"), [("aggregated", "aggregated"), ("decode", "decode"), ("prefill", "prefill")]
)
def test_healthy_engines_on_cpu_are_clean(name: str, role: str) -> None:
    text = (ROOT / "tests" / "fixtures" / "engines" / f"{name}.log").read_text(encoding="utf-8")
    assert scan(name, EngineLog(role, text, text), on_gpus=False) == []


@pytest.mark.parametrize(
    ("line", "role", "signature"),
    [
        ("Reqid: cmpl-1, Total tokens 9, LMCache hit tokens: 0, need to load: 0", "decode", "lmcache-decoder-miss"),
        ("LMCache INFO: [req_id=a-0] Retrieved 512 out of 1024 required tokens", "decode", "lmcache-partly-retrieved"),
        ("LMCache WARNING: Failed to allocate memory object, retrying...", "prefill", "lmcache-no-memory"),
        ('RuntimeError: No supported cpu connector found.', "decode", "lmcache-not-on-cpu"),
        ("ERROR [nixl_connector.py:827] Handshake failed for request cmpl-2", "decode", "nixl-handshake-failed"),
        ("ERROR NIXL transfer failure: handshake_setup_failed | Context: {}", "decode", "nixl-handshake-failed"),
        ("RuntimeError: NIXL compatibility hash mismatch. Local: a, remote: b", "decode", "nixl-incompatible"),
        ("ERROR NIXL transfer failure: transfer_failed | Context: {}", "decode", "nixl-transfer-failed"),
        ("WARNING Releasing expired KV blocks for request x", "prefill", "nixl-lease-expired"),
        ("ERROR Potentially invalid KV blocks for unrecognized request x", "prefill", "nixl-late-read"),
        ("UCX INFO ucp_context_0 intra-node cfg#2 rma_am(tcp/eth1) am(tcp/eth1)", "decode", "ucx-tcp-for-gpus"),
        ("WARNING Sequence group 221 is preempted by PreemptionMode.RECOMPUTE mode", "aggregated", "preemption"),
        ("INFO Cudagraph is disabled under eager mode", "aggregated", "cuda-graphs-off"),
        ("WARNING Triton kernel JIT compilation during inference: _k.", "decode", "compiled-while-serving"),
        ("INFO No available shared memory broadcast block found in 60 seconds.", "decode", "worker-stalled"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "aggregated", "out-of-memory"),
        ("ValueError: No available memory for the cache blocks. Try increasing", "aggregated", "kv-cache-too-small"),
        ("[Errno 98] error while attempting to bind: address already in use", "aggregated", "port-in-use"),
        ("ValueError: Token id 151708 is out of vocabulary", "aggregated", "token-out-of-vocabulary"),
    ],
)  # fmt: skip
def test_lines_as_they_are_reported(line: str, role: str, signature: str) -> None:
    ids = [
        one.signature.id for one in scan("e", EngineLog(role, "", f"before\n{line}\nafter\n"), on_gpus=True)
    ]
    assert ids == [signature]
    (finding,) = scan("e", EngineLog(role, "", line), on_gpus=True)
    assert (finding.part, finding.count) == ("cell", 1)
    assert next(iter(summary([finding]))) == f"e: {signature} (1 times, cell)"


def test_signatures_are_only_looked_for_where_they_mean_something() -> None:
    graphs = "INFO Cudagraph is disabled under eager mode"
    assert scan("e", EngineLog("aggregated", graphs, ""), on_gpus=False) == []
    miss = "Reqid: a, Total tokens 9, LMCache hit tokens: 0, need to load: 0"
    assert scan("e", EngineLog("prefill", miss, ""), on_gpus=True) == []


def lmcache(number: int, second: float, kind: str) -> str:
    stamp = f"[2026-12-01 03:00:{int(second):02d},{int(second % 1 * 1000):03d}]"
    if kind == "hit":
        counts = "Total tokens 100, LMCache hit tokens: 100, need to load: 99"
        return f"{stamp} LMCache INFO: Reqid: r{number}, {counts} (x.py:1:x)"
    if kind == "got":
        return f"{stamp} LMCache INFO: [req_id=r{number}] Retrieved 100 out of 100 required tokens"
    return f"{stamp} LMCache INFO: Retrieved 100 out of 100 out of total 100 tokens"


def unanswered(*lines: str) -> int:
    log = EngineLog("decode", "", "\n".join(lines))
    return sum(
        one.count for one in scan("e", log, on_gpus=True) if one.signature.id == "lmcache-never-loaded"
    )


def test_hits_are_paired_with_retrievals_of_the_same_request() -> None:
    pairs = [lmcache(n, n, kind) for n in range(5) for kind in ("hit", "got")]
    assert unanswered(*pairs) == 0
    assert unanswered(*[line for line in pairs if "[req_id=r1]" not in line]) == 1
    # A request that was announced just before the end may be under way; older versions name no request.
    assert unanswered(*pairs, lmcache(9, 10.0, "hit"), lmcache(8, 10.9, "hit")) == 0
    assert unanswered(*pairs, lmcache(9, 10.0, "hit"), lmcache(8, 12.0, "hit")) == 1
    assert unanswered(*[lmcache(n, n, kind) for n in range(5) for kind in ("hit", "old")]) == 0


def test_every_rank_must_have_loaded() -> None:
    whole = [lmcache(1, 1, "hit"), lmcache(1, 1, "got"), lmcache(1, 1, "got")]
    assert lmcache_loads("\n".join(whole)).loaded == 100
    half = whole[2].replace("Retrieved 100", "Retrieved 40")
    assert lmcache_loads("\n".join([*whole[:2], half])).loaded == 40


def test_transports_as_ucx_prints_them() -> None:
    lanes = "rma(rc_mlx5/mlx5_ib2:1)  amo(rc_mlx5/x:1)  am(cuda_ipc/cuda tcp/eth0)"
    line = f"ucp_worker.c:1903 UCX  INFO    ucp_context_2 inter-node cfg#3 {lanes}"
    assert ucx_transports(line) == {"rc_mlx5", "cuda_ipc", "tcp"}
    assert ucx_transports("UCX_TLS=tcp rma(tcp/lo)") == set()


def test_parts_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "e.log"
    assert (size_of(path), read_part(path, 0, 10)) == (0, "")
    path.write_bytes(b"start\n" + "é".encode() + b"cell\n")
    assert read_part(path, 6, size_of(path)) == "écell\n"
    assert read_part(path, 0, 6) == "start\n"
    monkeypatch.setattr("splitbench.measuring.logs.PART_LIMIT_BYTES", 8)
    path.write_bytes(b"abcdefghijklmnopqrst")
    assert read_part(path, 0, 20) == "abcd\n[12 bytes left out]\nqrst"


def test_the_catalogue_is_whole_and_the_page_is_made_from_it() -> None:
    assert len(SIGNATURES) >= 15
    assert len({one.id for one in SIGNATURES}) == len(SIGNATURES)
    for one in SIGNATURES:
        assert re.match(r"https://\S+$", one.source)
        assert one.meaning.endswith(".")
        assert one.mend
    page = (ROOT / "docs" / "log-signatures.md").read_text(encoding="utf-8")
    assert page == render(), "run: python -m splitbench.measuring.signatures docs/log-signatures.md"
