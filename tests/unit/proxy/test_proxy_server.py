# SPDX-License-Identifier: Apache-2.0
"""The proxy's own HTTP: endpoints, limits, connections, its trace and its metrics."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitbench.errors import UserError
from splitbench.proxy.options import EngineAddress, Options
from splitbench.proxy.server import Proxy
from tests.fakes.mock_engine import Behaviour
from tests.fakes.proxy_layout import LIMITS, Layout, layout, run

BODY: dict[str, Any] = {"prompt": "one two three", "max_tokens": 3, "ignore_eos": True}


def test_healthy_only_when_every_engine_is() -> None:
    async def test() -> None:
        async with layout("nixl", prefills=2, decodes=2) as up:
            assert (await up.ask(path="/health", method="GET")).status == 200
            for engine in (up.prefillers[1], up.decoders[0]):
                engine.healthy = False
                got = await up.ask(path="/health", method="GET")
                assert got.status == 503
                assert got.value["engines"][f"127.0.0.1:{engine.port}"] == "status 503"
                engine.healthy = True
            await up.decoders[1].stop()
            got = await up.ask(path="/health", method="GET")
            assert got.status == 503
            states = got.value["engines"]
            assert [state for state in states.values() if state != "ok"] == [
                f"decode engine 127.0.0.1:{up.decoders[1].port}: Connection refused"
            ]

    run(test())


def test_the_other_endpoints() -> None:
    async def test() -> None:
        async with layout("nixl", decodes=2) as up:
            got = await up.ask(path="/v1/models", method="GET")
            assert got.status == 200 and got.value["data"][0]["id"] == "mock"
            await up.decoders[0].stop()
            assert (await up.ask(path="/v1/models", method="GET")).status == 200
            await up.decoders[1].stop()
            assert (await up.ask(path="/v1/models", method="GET")).status == 502

        async with layout("nixl", decodes=2) as up:
            got = await up.ask(path="/reset_prefix_cache?reset_external=true")
            assert got.status == 200 and set(got.value["engines"].values()) == {"ok"}
            for engine in [*up.prefillers, *up.decoders]:
                assert engine.seen[-1].path == "/reset_prefix_cache?reset_external=true"
            up.prefillers[0].reset_status = 404
            assert (await up.ask(path="/reset_prefix_cache")).status == 502

            info = (await up.ask(path="/server_info?config_format=json", method="GET")).value
            assert info["proxy"]["options"]["mode"] == "nixl"
            assert [entry["server_info"]["vllm_config"] for entry in info["engines"]] == [
                "prefill0",
                "decode0",
                "decode1",
            ]
            assert (await up.ask(path="/v1/embeddings")).status == 404
            assert (await up.ask(path="/v1/completions", method="GET")).status == 405

    run(test())


def samples(text: str) -> dict[str, float]:
    """Prometheus text as a dict; also checks its form."""
    found = {}
    typed = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert re.fullmatch(r'[a-z_]+(\{([a-z]+="[^"]*",?)+\})?', name), name
            family = name.partition("{")[0]
            assert family in typed or re.sub(r"_(bucket|sum|count)$", "", family) in typed
            found[name] = float(value)
    return found


def test_metrics_count_what_happened() -> None:
    async def test() -> None:
        async with layout("lmcache", first_token="prefiller", ranks=2) as up:
            for _ in range(3):
                await up.ask(BODY | {"stream": True})
            await up.ask(b"no json")
            got = await up.ask(path="/metrics", method="GET")
            assert got.headers["content-type"].startswith("text/plain")
            found = samples(got.raw.decode())
            prefix = "splitbench_proxy_"
            assert found[prefix + 'requests_total{endpoint="/v1/completions",status="200"}'] == 3
            assert found[prefix + 'requests_total{endpoint="/v1/completions",status="400"}'] == 1
            assert found[prefix + 'kv_notifications_total{kind="awaited"}'] == 6
            assert found[prefix + "in_flight"] == found[prefix + "kv_waiting"] == 0
            assert found[prefix + 'stage_seconds_count{stage="prefill"}'] == 3
            assert found[prefix + 'stage_seconds_bucket{stage="prefill",le="+Inf"}'] == 3
            engine = f'{{role="decode",engine="127.0.0.1:{up.decoders[0].port}"}}'
            assert found[prefix + "engine_requests_total" + engine] == 3

    run(test())


def test_the_trace_tells_when_and_where(tmp_path: Path) -> None:
    async def test(mode: str, first_token: str, path: Path) -> list[dict[str, Any]]:
        async with layout(mode, first_token=first_token, decodes=2, trace_file=path) as up:
            await up.ask(BODY | {"stream": True}, headers={"x-request-id": "bench-7"})
            await up.ask(BODY | {"prompt": ["a", "b"]})
            await up.ask({"prompt": ""})
            up.decoders[1].script.append(Behaviour(die_after_events=1))
            up.decoders[0].script.append(Behaviour(die_after_events=1))
            await up.ask(BODY | {"stream": True})
            names = {f"127.0.0.1:{engine.port}" for engine in up.decoders}
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert {row["decoder"] for row in rows if row["decoder"]} == names
        return rows

    order = [
        "prefill_sent_ms",
        "prefill_answered_ms",
        "decode_sent_ms",
        "decode_first_byte_ms",
        "last_byte_ms",
    ]
    for mode, first_token in (("nixl", "decoder"), ("lmcache", "prefiller"), ("round-robin", "decoder")):
        rows = run(test(mode, first_token, tmp_path / f"{mode}.jsonl"))
        first = rows[0]
        assert first["client_request_id"] == "bench-7" and first["request_id"].startswith("bench-7-")
        assert first["status"] == 200 and first["error"] is None and first["first_token"] == first_token
        times = [first[name] for name in order if mode != "round-robin" or "prefill" not in name]
        assert times == sorted(times) and times[0] >= 0
        assert (first["kv_moved"], first["prefiller"] is None) == (
            (None, True) if mode == "round-robin" else (True, False)
        )
        if mode != "round-robin":
            assert first["kv_ready_ms"] <= first["decode_sent_ms"]
            assert [row.get("part") for row in rows] == [None, None, 0, 1, None, None]
        if first_token == "prefiller":
            assert first["first_byte_ms"] < first["decode_first_byte_ms"]
        else:
            assert first["first_byte_ms"] == first["decode_first_byte_ms"]
        refused, broken = rows[-2], rows[-1]
        assert (refused["status"] == 400 and refused["last_byte_ms"] is None) or mode == "round-robin"
        assert broken["status"] == 200 and "closed the connection" in broken["error"]


async def raw(up: Layout, data: bytes) -> bytes:
    """What the proxy answers until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", up.proxy.port)
    writer.write(data)
    got = await reader.read()
    writer.close()
    return got


def request(body: bytes = b"{}", *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST /v1/completions HTTP/" + version, b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def test_requests_that_are_none() -> None:
    async def test() -> None:
        async with layout("round-robin", limits=replace(LIMITS, body_bytes=1000)) as up:
            for data, status in (
                (b"nonsense\r\n\r\n", 400),
                (b"GET /health HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", 200),
                (b"GET /health HTTP/1.0\r\n\r\n", 200),
                (request(b"x" * 1001), 413),
                (
                    request(b"", b"transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
                    + b"400\r\n"
                    + b"x" * 1024
                    + b"\r\n0\r\n\r\n",
                    413,
                ),
                (request(b"{}", b"x: " + b"y" * 70_000), 431),
                (request(b"{}", version=b"1.0"), 505),
            ):
                got = await raw(up, data)
                assert got.startswith(b"HTTP/1.1 %d " % status), (data[:60], got)
                assert b"connection: close" in got
            assert not up.decoders[0].completions()

    run(test())


def test_connections_are_kept_and_requests_on_them_answered_in_order() -> None:
    async def test() -> None:
        async with layout("round-robin") as up:
            many = b"".join(
                request(
                    json.dumps(BODY | {"prompt": f"p{i}"}).encode(),
                    *([b"connection: close"] if i == 4 else []),
                )
                for i in range(5)
            )
            up.decoders[0].script.append(Behaviour(delay_s=0.05))
            got = await raw(up, many)
            answers = re.findall(rb'"text": "[^"]*"', got)
            want = [(await up.ask(BODY | {"prompt": f"p{i}"}, port=up.direct.port)).raw for i in range(5)]
            assert answers == [re.search(rb'"text": "[^"]*"', one)[0] for one in want]  # type: ignore[index]
            # One connection of the client, one to the engine, and one ahead.
            assert len(up.decoders[0].connections) == 2

    run(test())


def test_a_connection_is_ready_before_it_is_wanted() -> None:
    async def test() -> None:
        async with layout("round-robin") as up:
            engine = up.decoders[0]
            engine.script += [Behaviour(delay_s=0.3), Behaviour(delay_s=0.3)]
            first = asyncio.create_task(up.ask(BODY))
            while len(engine.connections) < 2:
                await asyncio.sleep(0.01)
            ready = set(engine.connections)
            second = asyncio.create_task(up.ask(BODY))
            while len(busy := {c for c in engine.connections if c.task and not c.task.done()}) < 2:
                await asyncio.sleep(0.01)
            assert busy <= ready
            assert (await first).status == (await second).status == 200

    run(test())


def test_a_body_in_chunks_and_after_a_continue() -> None:
    async def test() -> None:
        async with layout("nixl") as up:
            body = json.dumps(BODY).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            chunked = b"transfer-encoding: chunked\r\n\r\n4\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n"
            got = await raw(up, head + chunked % (body[:4], len(body) - 4, body[4:]))
            assert got.startswith(b"HTTP/1.1 200")

            reader, writer = await asyncio.open_connection("127.0.0.1", up.proxy.port)
            writer.write(head + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()

    run(test())


def test_engines_that_close_kept_connections_are_asked_again() -> None:
    async def test() -> None:
        async with layout("nixl") as up:
            for _ in range(5):
                assert (await up.ask(BODY)).status == 200
                for engine in [*up.prefillers, *up.decoders]:
                    for connection in list(engine.connections):
                        connection.transport.close()
                # Sometimes before the proxy hears of it.
                assert (await up.ask(BODY)).status == 200

    run(test())


def test_least_loaded_prefers_the_idle_replica() -> None:
    async def test() -> None:
        async with layout("round-robin", decodes=2, policy="least-loaded") as up:
            up.decoders[0].script.append(Behaviour(hang=True))
            busy = asyncio.ensure_future(up.ask(BODY))
            await up.until(lambda: up.decoders[0].running)
            for _ in range(6):
                assert (await up.ask(BODY)).status == 200
            assert len(up.decoders[1].completions()) == 6
            busy.cancel()

    run(test())


def test_many_streams_at_once() -> None:
    async def test() -> None:
        async with layout("nixl", prefills=2, decodes=2) as up:
            for engine in up.decoders:
                engine.default = Behaviour(token_delay_s=0.001)
            body = BODY | {"max_tokens": 10, "stream": True}
            got = await asyncio.gather(*[up.ask(body) for _ in range(200)])
            assert all(len(one.events) == 11 and not one.broken for one in got)

    run(test())


def test_addresses_that_cannot_be_had(tmp_path: Path) -> None:
    async def test() -> None:
        async with layout("lmcache") as up:
            address = EngineAddress("127.0.0.1", 1, (2,), (3,))
            options = Options("lmcache", port=0, prefillers=(address,), decoders=(address,))
            for wrong, where in (
                (replace(options, port=up.proxy.port, notify_port=0), "--port"),
                (replace(options, notify_port=up.proxy.notify_port), "--proxy-host, --proxy-port"),
                (replace(options, notify_host="192.0.2.1", notify_port=0), "--proxy-host, --proxy-port"),
                (replace(options, notify_port=0, trace_file=tmp_path), "--trace-file"),
            ):
                with pytest.raises(UserError) as caught:
                    await Proxy(wrong).start()
                assert caught.value.where == where and caught.value.mend

    run(test())


def test_stopping_ends_what_is_in_work() -> None:
    async def test() -> None:
        async with layout("nixl") as up:
            up.decoders[0].script.append(Behaviour(hang=True))
            asked = asyncio.ensure_future(up.ask(BODY))
            await up.until(lambda: up.decoders[0].running)
            await up.proxy.stop()
            await up.until(lambda: not up.decoders[0].running)
            with pytest.raises(Exception, match="disconnected"):
                await asked

    run(test())
