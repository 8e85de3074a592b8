# SPDX-License-Identifier: Apache-2.0
"""Clients that want to get past the proxy, or to keep it from others."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace

import pytest

from splitbench.proxy.options import Options
from tests.fakes.proxy_layout import LIMITS, Layout, layout, run

BODY = json.dumps({"prompt": "one two", "max_tokens": 2, "ignore_eos": True}).encode()
SMUGGLED = b"POST /reset_prefix_cache HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


async def sent(up: Layout, data: bytes, limit_s: float = 3.0) -> bytes:
    """What the proxy answers until it closes, or is silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", up.proxy.port)
    writer.write(data)
    got = b""
    try:
        async with asyncio.timeout(limit_s):
            while piece := await reader.read(65536):
                got += piece
                if got.endswith(b"0\r\n\r\n") or b'"choices"' in got:
                    break
    except TimeoutError:
        pass
    writer.close()
    return got


def with_length(*lines: bytes, body: bytes = BODY) -> bytes:
    return (
        HEAD
        + b"content-length: %d\r\n" % len(body)
        + b"".join(line + b"\r\n" for line in lines)
        + b"\r\n"
        + body
    )


TWO_READINGS = {
    "length beside chunks": with_length(b"transfer-encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
    "chunks beside length": HEAD
    + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "two lengths": HEAD + b"content-length: 2\r\ncontent-length: 90\r\n\r\n{}" + SMUGGLED,
    "length with a sign": HEAD + b"content-length: +2\r\n\r\n{}" + SMUGGLED,
    "length in hex": HEAD + b"content-length: 0x2\r\n\r\n{}" + SMUGGLED,
    "length below zero": HEAD + b"content-length: -1\r\n\r\n{}" + SMUGGLED,
    "length without end": HEAD + b"content-length: 99999999999999999999999\r\n\r\n{}",
    "coding that is none": HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "coding after chunked": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "space before the colon": HEAD + b"content-length : 2\r\n\r\n{}" + SMUGGLED,
    "chunk size below zero": HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n" + SMUGGLED,
    "chunk size without end": HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
    "NUL in a field": HEAD + b"x: a\0b\r\ncontent-length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("case", TWO_READINGS)
def test_a_request_with_two_readings_reaches_no_engine(case: str) -> None:
    async def test() -> None:
        async with layout("round-robin") as up:
            got = await sent(up, TWO_READINGS[case])
            assert got.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 ")), got[:200]
            assert got.count(b"HTTP/1.1 ") == 1
            # Neither the request nor what hides behind it.
            assert [seen.path for seen in up.decoders[0].seen if seen.path != "/health"] == []
            assert (await up.ask(json.loads(BODY))).status == 200

    run(test())


def test_only_named_fields_of_the_head_reach_an_engine() -> None:
    async def test() -> None:
        async with layout("round-robin") as up:
            fields = [
                b"cookie: crumbs",
                b"x-evil: 1",
                b"host: elsewhere",
                b"connection: x-evil",
                b"te: trailers",
            ]
            fields += [
                b"proxy-authorization: x",
                b"x-forwarded-for: 1.2.3.4",
                b"authorization: Bearer sesame",
            ]
            await sent(up, with_length(*fields, b"x-request-id: a\tb"))
            (seen,) = up.decoders[0].completions()
            assert seen.headers["authorization"] == "Bearer sesame"
            told = " ".join(f"{name}: {value}" for name, value in seen.headers.items())
            for word in ("crumbs", "x-evil", "elsewhere", "trailers", "1.2.3.4", "proxy-auth"):
                assert word not in told
            assert seen.headers["x-request-id"].isprintable()

    run(test())


def test_slow_and_silent_clients_hold_up_nobody() -> None:
    async def test() -> None:
        async with layout("round-robin", limits=replace(LIMITS, body_bytes=1000)) as up:
            slow = []
            for number in range(200):
                _, writer = await asyncio.open_connection("127.0.0.1", up.proxy.port)
                # Nothing; half a line; a head without an end; a body without an end.
                writer.write([b"", b"POST /v1/com", HEAD + b"a: b\r\n", with_length()[:-3]][number % 4])
                slow.append(writer)
            loop = asyncio.get_running_loop()
            began = loop.time()
            answers = await asyncio.gather(*(up.ask(json.loads(BODY)) for _ in range(8)))
            assert [answer.status for answer in answers] == [200] * 8
            assert loop.time() - began < 10
            assert len(up.decoders[0].completions()) == 8
            held = len(up.proxy._connections)
            assert held >= 200
            for writer in slow:
                writer.close()
            await up.until(lambda: len(up.proxy._connections) <= held - 200)

    run(test())


def test_requests_in_line_on_one_connection_are_counted() -> None:
    async def test() -> None:
        async with layout("round-robin") as up:
            got = await sent(up, with_length() * 40, limit_s=1.0)
            assert got.count(b"HTTP/1.1 ") < 40
            assert (await up.ask(json.loads(BODY))).status == 200

    run(test())


def test_it_listens_on_this_machine_only_unless_it_is_told() -> None:
    assert (
        Options.__dataclass_fields__["host"].default,
        Options.__dataclass_fields__["notify_host"].default,
    ) == (
        "127.0.0.1",
        "127.0.0.1",
    )

    async def test() -> None:
        async with layout("lmcache", ranks=1) as up:
            assert up.proxy._server is not None
            assert [one.getsockname()[0] for one in up.proxy._server.sockets] == ["127.0.0.1"]
            for port in (up.proxy.port, up.proxy.notify_port):
                with socket.socket() as other, pytest.raises(OSError, match="refused"):
                    other.connect(("127.0.0.2", port))

    run(test())
