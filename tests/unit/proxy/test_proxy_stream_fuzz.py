# SPDX-License-Identifier: Apache-2.0
"""Any stream, framed and split anyhow, comes out byte-equal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splitbench.proxy.engines import Engine
from splitbench.proxy.events import EventRelay, EventSplitter
from splitbench.proxy.options import EngineAddress
from splitbench.proxy.relay import Relay
from splitbench.proxy.sewing import StreamRewriter
from splitbench.proxy.wire import EngineError, FramingError, WholeChunks, payload_of, relayed_head
from tests.fakes.mock_engine import Behaviour
from tests.fakes.proxy_layout import layout, run

# Text with everything that could confuse: framing, blank lines, keys of the usage, long characters.
CONFUSING = ["\n\n", "\r\n", "0\r\n\r\n", "\r\n\r\n", "5\r\n", "data: [DONE]\n\n", "🙂é語"]
CONFUSING += ['"prompt_tokens"', '"created":1']
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(CONFUSING)
PAYLOADS = st.lists(TEXTS, min_size=1, max_size=12).map(lambda texts: "".join(texts).encode())
FRAMINGS = st.sampled_from([b"%x\r\n", b"%X\r\n", b"000%x\r\n", b"%x;name=value\r\n", b'%x;a="b c"\r\n'])
ENDS = st.sampled_from(
    [b"0\r\n\r\n", b"000\r\n\r\n", b"0;x=y\r\n\r\n", b"0\r\nTrailer: v\r\nOther: w\r\n\r\n"]
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Pieces of `data`, cut at the places (taken modulo its length)."""
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(edges)]


CUTS = st.lists(st.integers(0, 10_000), max_size=30)


@st.composite
def chunked(draw: st.DrawFn, payloads: st.SearchStrategy[bytes] = PAYLOADS) -> tuple[bytes, bytes]:
    """A payload, and a chunked body that carries it."""
    payload = draw(payloads)
    body = b""
    for piece in cut(payload, draw(CUTS)):
        if piece:
            body += draw(FRAMINGS) % len(piece) + piece + b"\r\n"
    return payload, body + draw(ENDS)


class Sink:
    """A client that keeps what it gets."""

    def __init__(self) -> None:
        self.started = False
        self.write_paused = False
        self.got = b""
        self.writes: list[bytes] = []
        self.was_cut = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        self.got += data

    def cut(self) -> None:
        self.was_cut = True


@given(chunked(), CUTS, st.binary(max_size=8))
def test_whole_chunks_keeps_the_bytes_and_stops_at_the_end(
    made: tuple[bytes, bytes], cuts: list[int], rest: bytes
) -> None:
    payload, body = made
    chunks = WholeChunks()
    out = b""
    for piece in cut(body + rest, cuts):
        if chunks.done:
            break
        whole = chunks.feed(piece)
        out += whole
        # At every moment what has gone out is whole chunks: a prefix of the payload.
        assert payload.startswith(payload_of(out))
    assert chunks.done
    assert out == body
    assert payload_of(out) == payload
    assert rest.startswith(chunks.rest)


@given(st.binary(max_size=200), CUTS)
def test_whole_chunks_never_loops_or_invents(data: bytes, cuts: list[int]) -> None:
    chunks = WholeChunks()
    out = b""
    try:
        for piece in cut(data, cuts):
            out += chunks.feed(piece)
            if chunks.done:
                break
    except FramingError:
        pass
    assert data.startswith(out)


@given(PAYLOADS, CUTS)
def test_events_do_not_depend_on_the_reads(payload: bytes, cuts: list[int]) -> None:
    pieces, whole = EventSplitter(), EventSplitter()
    events = [event for piece in cut(payload, cuts) for event in pieces.feed(piece)]
    assert events == whole.feed(payload)
    assert b"".join(events) + pieces.rest == payload
    for event in events:
        body = event.removesuffix(b"\n\n").removesuffix(b"\n\r\n")
        assert b"\n\n" not in body and b"\n\r\n" not in body


def on_loop(work: Callable[[], Any]) -> Any:
    """Exchanges make futures of a running loop."""

    async def call() -> Any:
        return work()

    return asyncio.run(call())


ENGINE = Engine(EngineAddress("127.0.0.1", 1), "decode")


@given(chunked(), CUTS, st.booleans())
def test_the_relay_passes_any_split_of_any_stream(
    made: tuple[bytes, bytes], cuts: list[int], close: bool
) -> None:
    _, body = made

    def work() -> None:
        client = Sink()
        relay = Relay(ENGINE, client, "id", 60, close)
        for piece in cut(HEAD + body, cuts):
            relay.data_received(piece)
        assert relay._done.done() and relay._done.exception() is None
        headers = [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")]
        assert client.got == relayed_head(200, headers, "id", close) + body
        # The head never goes out alone: until the first byte the engine may still fail properly.
        assert client.writes[0] != relayed_head(200, headers, "id", close)

    on_loop(work)


@given(st.binary(max_size=300), CUTS, st.binary(max_size=5))
def test_the_relay_passes_bodies_of_known_length(body: bytes, cuts: list[int], beyond: bytes) -> None:
    def work() -> None:
        client = Sink()
        relay = Relay(ENGINE, client, "id", 60, False)
        head = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(body)
        for piece in cut(head + body + beyond, cuts):
            if not relay._done.done():
                relay.data_received(piece)
        assert relay._done.exception() is None
        assert client.got == relayed_head(404, [(b"content-length", b"%d" % len(body))], "id", False) + body

    on_loop(work)


EVENTS = st.lists(
    TEXTS.map(lambda text: text.replace("\n", " ").replace("\r", " ")), min_size=1, max_size=8
).map(lambda texts: b"".join(b"data: " + text.encode() + b"\n\n" for text in texts))


class Untouched:
    """A rewriter that leaves events alone."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick

    def __call__(self, data: bytes) -> bytes:
        return data

    def patch(self, data: bytes) -> bytes:
        return data


@given(chunked(EVENTS), CUTS, st.booleans())
def test_the_event_relay_passes_any_split_of_any_stream(
    made: tuple[bytes, bytes], cuts: list[int], quick: bool
) -> None:
    payload, body = made

    def work() -> None:
        client = Sink()
        relay = EventRelay(ENGINE, client, "id", 60, Untouched(quick), lambda: None)
        for piece in cut(HEAD + body, cuts):
            relay.data_received(piece)
        assert relay._done.exception() is None
        assert payload_of(client.got) == payload

    on_loop(work)


@given(chunked(EVENTS), CUTS)
# A chunk that is one newline looks like the end of an event, if its size line is read along with it.
@example((b"data: 0\n\ndata: 1\n\n", b"7\r\ndata: 0\r\n1\r\n\n\r\na\r\n\ndata: 1\n\n\r\n0\r\n\r\n"), [])
def test_a_stream_that_breaks_ends_with_an_error_event_of_its_own(
    made: tuple[bytes, bytes], cuts: list[int]
) -> None:
    payload, body = made
    broken = body[: len(body) * 2 // 3]

    def work() -> None:
        client = Sink()
        relay = Relay(ENGINE, client, "id", 60, False)
        for piece in cut(HEAD + broken, cuts):
            relay.data_received(piece)
        relay.eof_received()
        error = relay._done.exception()
        assert isinstance(error, EngineError) and error.status == 502
        if not client.started:
            assert client.got == b""
            return
        relay.break_off(error)
        assert client.was_cut
        text = payload_of(client.got.split(b"\r\n\r\n", 1)[1])
        before, found, last = text.rpartition(b'data: {"error":')
        assert found and last.endswith(b"\n\n")
        assert payload.startswith((before, before.removesuffix(b"\n\n")))
        assert before == b"" or before.endswith(b"\n\n")

    on_loop(work)


@pytest.mark.parametrize(("mode", "first_token"), [("nixl", "decoder"), ("lmcache", "prefiller")])
@settings(max_examples=15, deadline=None)
@given(places=CUTS)
def test_events_split_at_any_byte_arrive_over_the_network(
    mode: str, first_token: str, places: list[int]
) -> None:
    """The engine cuts its events anywhere, also within a character; each piece is a chunk and a write."""

    def reframe(event: bytes) -> list[bytes]:
        return cut(event, places)

    async def test() -> None:
        async with layout(mode, first_token=first_token) as up:
            up.decoders[0].default = Behaviour(reframe=reframe)
            body = {"prompt": "one two", "max_tokens": 7, "stream": True, "ignore_eos": True}
            body |= {"stream_options": {"include_usage": True}}
            got, want = await up.both(body)
            assert [e if e == "[DONE]" else (e["choices"], e.get("usage")) for e in got.events] == [
                e if e == "[DONE]" else (e["choices"], e.get("usage")) for e in want.events
            ]
            assert len({e["created"] for e in got.events[:-1]}) == 1

    run(test())


def test_the_rewriter_refuses_what_is_no_json() -> None:
    with pytest.raises(EngineError):
        StreamRewriter(0, None, False, keep_end=False)(b"data: {nonsense}\n\n")
