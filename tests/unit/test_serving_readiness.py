# SPDX-License-Identifier: Apache-2.0
"""The small HTTP client, what it makes of odd servers, and how much is probed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from splitbench.serving import readiness
from splitbench.serving.readiness import (
    Answer,
    ask,
    model_ids,
    pairs_to_probe,
    retrieved_tokens,
    transferred_tokens,
    until,
)

T = TypeVar("T")


def against(raw: bytes, question: Callable[[int], Awaitable[T]]) -> T:
    """Ask a server that sends these bytes whatever it is asked, and closes."""

    async def main() -> T:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(raw)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            return await question(server.sockets[0].getsockname()[1])

    return asyncio.run(main())


@pytest.mark.parametrize(
    "raw",
    [
        b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"ok": 1.0}',
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n{"ok":\r\n5;x=y\r\n 1.0}\r\n0\r\n\r\n',
        b'HTTP/1.0 200 OK\r\n\r\n{"ok": 1.0}',
    ],
    ids=["length", "chunked", "until close"],
)
def test_bodies_in_every_form(raw: bytes) -> None:
    answer = against(raw, lambda port: ask("127.0.0.1", port, "/"))
    assert (answer.status, answer.json()) == (200, {"ok": 1.0})


@pytest.mark.parametrize(
    "raw", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\ncut"]
)
def test_a_broken_answer_is_no_answer_and_no_exception(raw: bytes) -> None:
    answer = against(raw, lambda port: ask("127.0.0.1", port, "/"))
    assert answer.status == 0
    assert answer.text


def test_silence_and_refusal_are_told_apart() -> None:
    async def silent() -> Answer:
        async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async with await asyncio.start_server(nothing, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            slow = await ask("127.0.0.1", port, "/health", limit_s=0.05)
        gone = await ask("127.0.0.1", port, "/health", limit_s=5.0)
        assert gone.refused
        return slow

    slow = asyncio.run(silent())
    assert not slow.refused
    assert "no answer within" in slow.text


def test_model_ids_of_odd_answers() -> None:
    assert model_ids(Answer(200, '{"data": [{"id": "a"}, {"id": "b"}]}')) == ["a", "b"]
    assert model_ids(Answer(404, "not json")) == []
    assert model_ids(Answer(200, "[]")) == []


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ('{"choices": [{"text": " a b"}], "usage": {"completion_tokens": 2}}', None),
        ('{"choices": [{"text": ""}], "usage": {"completion_tokens": 0}}', "no tokens"),
        ('{"choices": []}', "without a completion"),
        ('{"error": "x"}', "without a completion"),
    ],
)
def test_a_completion_is_one_only_with_a_text(body: str, wrong: str | None) -> None:
    raw = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    said = against(raw, lambda port: readiness.complete("127.0.0.1", port, "m", 0, 16))
    assert said is None if wrong is None else wrong in str(said)


def test_moved_tokens_are_summed_over_engines_and_loads_count_before_hits() -> None:
    metrics = """
# HELP vllm:prompt_tokens_by_source x
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 256.0
vllm:prompt_tokens_by_source_total{engine="1",source="external_kv_transfer"} 1.28e+02
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 44.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 999.0
"""
    assert transferred_tokens(metrics) == 384.0
    only_hits = 'vllm:external_prefix_cache_hits_total{engine="0"} 999.0\n'
    assert transferred_tokens(only_hits) == 999.0
    assert transferred_tokens("vllm:prompt_tokens_total 5\n") is None


def test_every_engine_and_every_pair_is_touched() -> None:
    assert pairs_to_probe("aggregated", ["aggregated"]) == 1
    assert pairs_to_probe("replicas", ["aggregated"] * 3) == 3
    assert pairs_to_probe("pd", ["prefill", "prefill", "decode"]) == 2
    assert pairs_to_probe("pd", ["prefill"] * 2 + ["decode"] * 3) == 6


def test_waiting_reports_and_gives_up() -> None:
    told: list[float] = []

    async def never() -> bool:
        return False

    with pytest.raises(TimeoutError):
        asyncio.run(until(never, 0.1, told.append, every_s=0.02))
    assert told
    assert all(waited >= 0.02 for waited in told)


def test_the_supervisor_imports_nothing_heavy() -> None:
    code = (
        "import sys, splitbench.serving.supervisor\n"
        "names = 'pydantic', 'numpy', 'aiohttp', 'filelock', 'psutil', 'pynvml', 'msgspec'\n"
        "heavy = set(names) & set(sys.modules)\n"
        "sys.exit(str(sorted(heavy)) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_lmcaches_loads_are_counted_and_its_hits_are_not() -> None:
    hit = "(EngineCore pid=1) [t] LMCache INFO: Reqid: a, LMCache hit tokens: 1024, need to load: 1024 (x)\n"
    load = "(EngineCore pid=1) [t] LMCache INFO: [req_id=a] Retrieved 1024 out of 1024 required tokens (x)\n"
    assert retrieved_tokens(hit * 3) == 0
    assert retrieved_tokens(load.replace("INFO:", "INFO:\x1b[0m")) == 1024
    assert retrieved_tokens(hit + load + hit + load) == 2048
    real = Path(__file__).parents[1] / "fixtures" / "engines" / "gpu-lmcache.log"
    assert retrieved_tokens(real.read_text(encoding="utf-8")) == 18 + 1024
