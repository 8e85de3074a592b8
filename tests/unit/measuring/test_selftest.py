# SPDX-License-Identifier: Apache-2.0
"""The client's own error against an engine that writes down when it sent each token."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from splitbench.errors import UserError
from splitbench.measuring import selftest
from splitbench.measuring.floor import Floor, nearest, read_floor
from splitbench.measuring.selftest import PACED_ENGINE, _free_port, _listens, errors_of, floor_or_why
from splitbench.workflow import Workflow


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


def test_a_failed_self_test_keeps_nobody_from_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise UserError("no client here")

    monkeypatch.setattr(selftest, "write_floor", fails)
    path = tmp_path / "floor.json"
    for python, why in (
        (Path(sys.executable), "no client here"),
        (tmp_path / "gone", "the serving environment that measured the cells is not on this machine"),
    ):
        said: list[str] = []
        flow = SimpleNamespace(serving_python=python)
        floor_or_why(cast("Workflow", flow), path, said.append, [1])
        assert read_floor(path) == {"rows": [], "why_not": why}
        assert f"there is no measurement floor: {why}" in said[0]


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
    assert read_floor(tmp_path / "none.json") is None
    rows = [{"streams": n, "itl_error_p50_ms": n / 100, "itl_error_p99_ms": n / 10} for n in (1, 8, 64)]
    assert nearest((), 4) is nearest(rows, None) is None
    found = [nearest(rows, n) for n in (1, 2.5, 5, 20, 500)]
    assert [floor.streams for floor in found if floor] == [1, 1, 8, 8, 64]
    assert found[-1] == Floor(64, 0.64, 6.4)


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
