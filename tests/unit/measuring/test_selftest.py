# SPDX-License-Identifier: Apache-2.0
"""The client's own error against an engine that writes down when it sent each token."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from splitbench.errors import UserError
from splitbench.measuring.selftest import PACED_ENGINE, _free_port, _listens, errors_of, floor_at


def made_up(late_ms: float = 0.0, merged: bool = False) -> dict[str, list[object]]:
    """Four answers of three tokens, 20 ms apart, whose second gap is seen too long by this much."""
    stamps = [1_000_000_000, 1_020_000_000, 1_040_000_000]
    itls = [0.02, 0.02 + late_ms / 1e3]
    return {
        "generated_texts": ["".join(f" {stamp:020d}" for stamp in stamps)] * 4,
        "itls": [itls[:1] if merged else itls] * 4,
        "ttfts": [0.103] * 4,
        "start_times": [0.9] * 4,
        "errors": [""] * 4,
    }


def test_reported_less_true() -> None:
    exact = errors_of(made_up())
    assert exact["itl_error_max_ms"] == pytest.approx(0, abs=1e-9)
    assert exact["ttft_error_p50_ms"] == pytest.approx(3.0)
    late = errors_of(made_up(late_ms=1.5))
    assert late["itl_error_p99_ms"] == pytest.approx(1.5)
    assert errors_of(made_up(merged=True))["merged_percent"] == 100


def test_a_failed_request_is_no_measurement() -> None:
    failed = made_up() | {"errors": ["", "boom", "", ""]}
    with pytest.raises(UserError, match="boom"):
        errors_of(failed)


def test_a_client_that_states_no_start_times() -> None:
    # vLLM 0.11.0: its answer to the paced engine, twelve tokens of each of two streams.
    kept = Path(__file__).parents[2] / "fixtures" / "vllm" / "bench-0.11.0.json"
    found = errors_of(json.loads(kept.read_text(encoding="utf-8")))
    assert 0 < found["itl_error_p50_ms"] < 2 and found["merged_percent"] == 0
    assert "ttft_error_p50_ms" not in found


def test_the_nearest_number_of_streams_counts(tmp_path: Path) -> None:
    path = tmp_path / "client-floor.json"
    assert floor_at(path, 4) is None
    path.write_text(json.dumps({"rows": [{"streams": n, "itl_error_p99_ms": n / 10} for n in (1, 8, 64)]}))
    assert floor_at(path, None) is None
    assert [floor_at(path, n) for n in (1, 5, 20, 500)] == [0.1, 0.8, 0.8, 6.4]


def test_the_paced_engine_writes_the_moment_into_each_token() -> None:
    port = _free_port()
    argv = [sys.executable, str(PACED_ENGINE), "--port", str(port), "--tokens", "5", "--interval-ms", "10"]

    async def ask() -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"prompt": [1, 2], "max_tokens": 5, "stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        text = (await reader.readuntil(b"[DONE]")).decode()
        writer.close()
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return [int(event["choices"][0]["text"]) for event in events if event["choices"]]

    with subprocess.Popen(argv) as engine:
        try:
            until_s = time.monotonic() + 30
            while not _listens(port):
                assert time.monotonic() < until_s
                time.sleep(0.05)
            began_ns = time.perf_counter_ns()
            stamps = asyncio.run(ask())
        finally:
            engine.terminate()
    assert len(stamps) == 5
    assert began_ns < stamps[0] < stamps[-1] < time.perf_counter_ns()
    # Its pace is counted from the start, so a late token does not move the others.
    assert stamps[-1] - stamps[0] >= 39_000_000
