# SPDX-License-Identifier: Apache-2.0
"""Engines that die, hang or lose KV, clients that leave: an error in time, and the next request works."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.mock_engine import Behaviour
from tests.fakes.proxy_layout import LIMITS, Layout, layout, run

MODES = [
    ("round-robin", "decoder"),
    ("nixl", "decoder"),
    ("lmcache", "decoder"),
    ("lmcache", "prefiller"),
    ("lmcache-mp", "prefiller"),
]
PD = MODES[1:]
BODY: dict[str, Any] = {"prompt": "one two three", "max_tokens": 12, "ignore_eos": True}
STREAM = BODY | {"stream": True}
SHORT = 0.3


async def quiet(up: Layout) -> None:
    """Nothing runs, nothing is held, nobody waits."""
    engines = [*up.prefillers, *up.decoders]
    await up.until(lambda: not any(e.running or e.held or e.buffer for e in engines))
    await up.until(lambda: up.proxy.metrics.in_flight == up.proxy.metrics.kv_waiting == 0)
    await up.until(lambda: not any(e.in_flight for e in up.proxy.engines))


async def works(up: Layout) -> None:
    """The next request is answered as if nothing had happened."""
    for body in (BODY, STREAM):
        got, want = await up.both(body)
        assert got.status == 200 and not got.broken
        if body is BODY:
            assert got.value["choices"] == want.value["choices"]
        else:
            assert [e["choices"] for e in got.events[:-1]] == [e["choices"] for e in want.events[:-1]]
    await quiet(up)


@pytest.mark.parametrize(("mode", "first_token"), MODES)
def test_a_dead_engine_is_an_error_and_its_return_is_noticed(mode: str, first_token: str) -> None:
    async def test() -> None:
        async with layout(mode, first_token=first_token) as up:
            await works(up)
            for engine in [*up.prefillers, *up.decoders]:
                port = engine.port
                await engine.stop()
                for body in (BODY, STREAM):
                    got = await up.ask(body)
                    if first_token == "prefiller" and engine in up.decoders and body is STREAM:
                        assert got.broken and got.events[-1]["error"]["code"] == 502
                    else:
                        assert got.status == 502
                        assert f"127.0.0.1:{port}" in got.value["error"]["message"]
                for owner in up.prefillers:
                    owner.held.clear()  # what only a lease frees: its one decoder is dead
                for owner in up.decoders:
                    owner.buffer.clear()
                await engine.start(port)
                await works(up)

    run(test())


def test_another_engine_stands_in_for_a_dead_one() -> None:
    async def test() -> None:
        for mode in ("round-robin", "nixl", "lmcache-mp"):
            async with layout(mode, prefills=2, decodes=2) as up:
                for engine in [*up.prefillers[:1], up.decoders[1]]:
                    await engine.stop()
                for _ in range(4):
                    await works(up)
                assert all(len(engine.completions()) >= 8 for engine in [*up.prefillers[1:], up.decoders[0]])

    run(test())


@pytest.mark.parametrize(("mode", "first_token"), MODES)
@pytest.mark.parametrize("within", [False, True])
def test_death_within_a_stream_is_an_error_event(mode: str, first_token: str, within: bool) -> None:
    async def test() -> None:
        async with layout(mode, first_token=first_token) as up:
            up.decoders[0].script.append(Behaviour(die_after_events=5, die_within_event=within))
            got, want = await up.both(STREAM)
            assert got.status == 200 and got.broken
            count = 5 + (first_token == "prefiller")
            assert [e["choices"] for e in got.events[:-1]] == [e["choices"] for e in want.events[:count]]
            assert got.events[-1]["error"]["code"] == 502
            await works(up)

    run(test())


@pytest.mark.parametrize(("mode", "first_token"), MODES)
def test_death_before_the_first_byte_is_a_status(mode: str, first_token: str) -> None:
    async def test() -> None:
        async with layout(mode, first_token=first_token) as up:
            dying = Behaviour(die_silently=True)
            head_only = Behaviour(die_after_events=0)  # 200 and headers, but no event
            for engine in [*up.prefillers, *up.decoders]:
                sewn = first_token == "prefiller" and engine in up.decoders
                # Connections are fresh for the first request only; a kept one is tried anew, once.
                for behaviours in (
                    ([dying, dying], [head_only]) if engine in up.decoders else ([dying, dying],)
                ):
                    engine.script.extend(behaviours)
                    got = await up.ask(STREAM)
                    if sewn:
                        assert got.events[-1]["error"]["code"] == 502 and got.broken
                    else:
                        assert got.status == 502, got.raw
                    engine.script.clear()
                    await works(up)

    run(test())


@pytest.mark.parametrize(("mode", "first_token"), MODES)
def test_silence_ends_within_the_limit(mode: str, first_token: str) -> None:
    async def test() -> None:
        limits = replace(LIMITS, prefill_s=SHORT, answer_s=SHORT, stall_s=SHORT, kv_s=SHORT)
        async with layout(mode, first_token=first_token, limits=limits) as up:
            for engine in [*up.prefillers, *up.decoders]:
                engine.script.append(Behaviour(hang=True))
                got = await up.ask(BODY)
                assert got.status == 504 and "sent nothing for 0.3 s" in got.value["error"]["message"]
                await quiet(up)
                assert engine.aborted == 1
            up.decoders[0].script.append(Behaviour(token_delay_s=3600))
            got = await up.ask(STREAM)
            assert got.broken and got.events[-1]["error"]["code"] == 504
            await quiet(up)

    run(test())


@pytest.mark.parametrize("first_token", ["decoder", "prefiller"])
@pytest.mark.parametrize(("notify", "status"), [("none", 504), ("first", 504), ("error", 502)])
def test_a_lost_notification_is_an_error(first_token: str, notify: str, status: int) -> None:
    async def test() -> None:
        limits = replace(LIMITS, kv_s=SHORT if status == 504 else 60)
        async with layout("lmcache", first_token=first_token, ranks=2, limits=limits) as up:
            up.prefillers[0].script.append(Behaviour(notify=notify))
            got = await up.ask(BODY)
            assert got.status == status
            if status == 504:
                arrived = 1 if notify == "first" else 0
                assert f"{arrived} of 2 ranks" in got.value["error"]["message"]
            await quiet(up)
            up.prefillers[0].script.append(Behaviour(notify=notify))
            got = await up.ask(STREAM)
            assert (got.events[-1]["error"]["code"] if first_token == "prefiller" else got.status) == status
            await quiet(up)
            assert up.proxy.metrics.releases == {"freed": 2}
            up.proxy.options = replace(up.proxy.options, limits=LIMITS)
            await works(up)

    run(test())


def test_a_full_buffer_is_an_error_and_room_is_used_again() -> None:
    async def test() -> None:
        limits = replace(LIMITS, prefill_s=SHORT)
        async with layout("lmcache", limits=limits) as up:
            up.decoders[0].buffer_slots = 0
            got = await up.ask(BODY)
            assert got.status == 504 and "prefill engine" in got.value["error"]["message"]
            up.decoders[0].buffer_slots = 1
            up.proxy.options = replace(up.proxy.options, limits=LIMITS)
            await works(up)

    run(test())


def test_a_notification_may_overtake_the_prefills_answer() -> None:
    async def test() -> None:
        async with layout("lmcache", ranks=2) as up:
            done = asyncio.Event()
            prefiller = up.prefillers[0]
            early = prefiller.send_kv

            async def send_first(spec: dict[str, Any], prompt: list[int], behaviour: Behaviour) -> None:
                await early(spec, prompt, behaviour)
                await up.until(lambda: up.proxy.metrics.notifications["awaited"] == 2)
                done.set()

            prefiller.send_kv = send_first  # type: ignore[method-assign]
            got = await up.ask(BODY)
            assert got.status == 200 and done.is_set()

    run(test())


def test_strange_notifications_harm_nobody() -> None:
    async def test() -> None:
        async with layout("lmcache") as up:
            await works(up)
            socket = up.prefillers[0]._push
            assert socket is not None
            for message in (b"", b"\xc1", b"\x81\xa1a\x01", b"plain"):
                socket.send(message)
            up.prefillers[0].notify("nobody", Behaviour(), 3)
            up.prefillers[0].notify("nobody", Behaviour(notify="error"), 1)
            counts = up.proxy.metrics.notifications
            await up.until(lambda: (counts["unreadable"], counts["unknown"], counts["failed"]) == (4, 3, 1))
            await works(up)

    run(test())


async def leave(up: Layout, body: dict[str, Any], when: Any, read: int = 0) -> None:
    """Send a request, and close the connection when it is time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", up.proxy.port)
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    if read:
        await reader.readexactly(read)
    await up.until(when)
    writer.transport.abort()


@pytest.mark.parametrize(("mode", "first_token"), MODES)
def test_a_client_that_leaves_ends_the_work_and_frees_the_kv(mode: str, first_token: str) -> None:
    async def test() -> None:
        async with layout(mode, first_token=first_token, ranks=2) as up:
            decoder = up.decoders[0]
            hang, slow = Behaviour(hang=True), Behaviour(token_delay_s=0.01)
            stages = [(prefiller, STREAM, 0, hang) for prefiller in up.prefillers]
            stages += [(decoder, STREAM, 0, hang), (decoder, STREAM, 100, slow), (decoder, BODY, 0, hang)]
            for number, (engine, body, read, behaviour) in enumerate(stages):
                engine.script.append(behaviour)
                aborted = engine.aborted
                await leave(up, body | {"max_tokens": 200}, lambda engine=engine: engine.running, read)
                await up.until(lambda engine=engine, aborted=aborted: engine.aborted == aborted + 1)
                await up.until(lambda number=number: up.proxy.metrics.cancelled == number + 1)
                await quiet(up)
            await works(up)

    run(test())


def test_a_client_that_leaves_while_kv_moves_leaves_no_kv() -> None:
    async def test() -> None:
        async with layout("lmcache", ranks=2) as up:
            up.prefillers[0].script.append(Behaviour(notify_delay_s=0.2))
            await leave(up, STREAM, lambda: up.proxy.metrics.kv_waiting == 1)
            await up.until(lambda: up.proxy.metrics.cancelled == 1)
            assert up.decoders[0].buffer
            await quiet(up)
            assert up.proxy.metrics.releases == {"freed": 1}
            assert up.decoders[0].completions()[-1].body["max_tokens"] == 1

    run(test())


def test_kv_of_a_request_that_the_decoder_refuses_is_freed() -> None:
    async def test() -> None:
        for mode in ("nixl", "lmcache"):
            async with layout(mode) as up:
                up.decoders[0].script.append(Behaviour(status=503, refusal="too busy"))
                got = await up.ask(STREAM)
                assert got.status == 503 and got.value["error"]["message"] == "too busy"
                await quiet(up)
                assert up.proxy.metrics.releases == {"freed": 1}

    run(test())


def test_kv_of_a_request_whose_decoder_died_is_freed_by_another() -> None:
    async def test() -> None:
        async with layout("nixl", decodes=2) as up:
            up.decoders[0].script.append(Behaviour(die_silently=True))
            dead = up.decoders[0]
            got = await up.ask(STREAM)
            assert got.status == 502
            await up.until(lambda: up.proxy.metrics.releases == {"freed": 1})
            assert not up.prefillers[0].held
            assert dead.aborted == 0

    run(test())


@pytest.mark.parametrize(("mode", "first_token"), MODES)
def test_an_engines_own_error_event_passes(mode: str, first_token: str) -> None:
    async def test() -> None:
        async with layout(mode, first_token=first_token) as up:
            up.decoders[0].script.append(Behaviour(error_event_after=3))
            got = await up.ask(STREAM)
            assert {"error": {"message": "engine is dead", "code": 500}} in got.events
            await works(up)

    run(test())


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcd\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
    ],
)
def test_what_is_not_http_is_a_bad_gateway(raw: bytes) -> None:
    async def test() -> None:
        for mode, first_token in MODES:
            async with layout(mode, first_token=first_token) as up:
                for engine in [*up.prefillers, *up.decoders]:
                    engine.script.append(Behaviour(raw=raw))
                    got = await up.ask(BODY)
                    assert got.status == 502, (mode, got.raw)
                    await quiet_but_held(up)

    run(test())


async def quiet_but_held(up: Layout) -> None:
    """Nobody works; what a dead decoder had pulled or not is its own affair."""
    await up.until(lambda: up.proxy.metrics.in_flight == 0)


def test_an_answer_that_ends_with_its_connection_passes() -> None:
    async def test() -> None:
        raw = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"choices": []}'
        for mode in ("round-robin", "nixl"):
            async with layout(mode) as up:
                up.decoders[0].script.append(Behaviour(raw=raw))
                got = await up.ask(BODY)
                assert got.status == 200 and got.value == {"choices": []}
                for prefiller in up.prefillers:
                    prefiller.held.clear()  # this answer did not look at its KV
                await works(up)

    run(test())


def test_a_slow_client_slows_the_engine_and_loses_nothing() -> None:
    async def test() -> None:
        size = 40 * 2**20
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % size
        payload = bytes(range(256)) * (size // 256)
        async with layout("round-robin") as up:
            up.decoders[0].script.append(Behaviour(raw=head + payload))
            reader, writer = await asyncio.open_connection("127.0.0.1", up.proxy.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
            await reader.readuntil(b"\r\n\r\n")
            # The client stops reading: the proxy must stop too, and hold little.
            connection = next(iter(up.proxy._connections))
            await up.until(lambda: connection.relays and connection.relays[0].paused)
            assert connection.transport.get_write_buffer_size() < 2**20
            assert await reader.readexactly(size) == payload
            writer.close()

    run(test())


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    async def test() -> None:
        size = 40 * 2**20
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % size
        async with layout("round-robin", limits=replace(LIMITS, stall_s=SHORT)) as up:
            up.decoders[0].script.append(Behaviour(raw=head + bytes(size)))
            _, writer = await asyncio.open_connection("127.0.0.1", up.proxy.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
            await up.until(lambda: up.proxy.metrics.requests)
            await quiet(up)
            writer.close()

    run(test())


def test_no_header_of_the_client_is_logged_or_traced(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    async def test() -> None:
        trace = tmp_path / "trace.jsonl"
        async with layout("nixl", trace_file=trace) as up:
            secret = {"authorization": "Bearer sesame", "x-request-id": "me", "cookie": "crumbs"}
            secret["traceparent"] = "00-1"
            assert (await up.ask(BODY, headers=secret)).status == 200
            for engine in (up.prefillers[0], up.decoders[0]):
                seen = engine.completions()[0].headers
                assert seen["authorization"] == "Bearer sesame" and seen["traceparent"] == "00-1"
                assert "cookie" not in seen
            await up.decoders[0].stop()
            assert (await up.ask(BODY, headers=secret)).status == 502
        written = trace.read_text() + caplog.text
        assert "me-" in written and "sesame" not in written and "crumbs" not in written
        assert "one two" not in written

    with caplog.at_level(logging.DEBUG):
        run(test())


@pytest.mark.parametrize(
    "event", [b"data: {nonsense}\n\n", b'data: {"choices": [3]}\n\n', b'data: {"choices": 1}\n\n']
)
def test_events_that_cannot_be_sewn_are_an_error(event: bytes) -> None:
    async def test() -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        async with layout("lmcache-mp", first_token="prefiller") as up:
            up.decoders[0].script.append(Behaviour(raw=head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)))
            got = await up.ask(STREAM)
            assert got.broken and got.events[-1]["error"]["code"] == 502
            await works(up)

    run(test())


def test_answers_that_cannot_be_sewn_are_an_error() -> None:
    async def test() -> None:
        for raw in (b"[]", b"{}", b'{"choices": []}', b"x"):
            answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw)
            async with layout("lmcache-mp", first_token="prefiller") as up:
                for engine in (up.prefillers[0], up.decoders[0]):
                    engine.script.append(Behaviour(raw=answer))
                    got = await up.ask(BODY)
                    assert got.status == 502, (raw, got.raw)
                await works(up)

    run(test())


def test_chat_answers_that_the_engine_parses_are_refused() -> None:
    async def test() -> None:
        reply = {"choices": [{"message": {"content": None, "reasoning": "w1"}, "finish_reason": "length"}]}
        reply["choices"][0]["token_ids"] = [1]
        raw = json.dumps(reply).encode()
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw)
        async with layout("lmcache-mp", first_token="prefiller") as up:
            for stream in (False, True):
                up.prefillers[0].script.append(Behaviour(raw=answer))
                body = {"messages": [{"role": "user", "content": "x"}], "stream": stream, "max_tokens": 3}
                got = await up.ask(body, "/v1/chat/completions")
                assert got.status == 400 and "--first-token decoder" in got.value["error"]["message"]
            # One of two answers has begun when the other turns out to be so.
            up.prefillers[0].script.extend([Behaviour(), Behaviour(raw=answer, delay_s=0.3)])
            got = await up.ask(body | {"n": 2, "max_tokens": 4}, "/v1/chat/completions")
            assert got.broken and got.events[-1]["error"]["code"] == 400
            await works(up)

    run(test())
