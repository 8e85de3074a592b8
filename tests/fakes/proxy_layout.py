# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of mock engines, all in the test's own event loop, and a client to ask them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop

from splitbench.proxy.options import EngineAddress, Limits, Options
from splitbench.proxy.server import Proxy
from tests.fakes.mock_engine import MockEngine, World

# Long enough that no busy machine reaches them; a test of a limit sets that one short.
LIMITS = Limits(connect_s=20, prefill_s=60, kv_s=60, answer_s=60, stall_s=60, body_bytes=2**20)


def run(work: Coroutine[Any, Any, Any], limit_s: float = 40) -> Any:
    """Run a test's coroutine on the loop that the proxy runs on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, limit_s))


@dataclass
class Reply:
    """An answer: `events` of a stream, or `value` of JSON; `broken` where it did not end as HTTP wants."""

    status: int
    headers: dict[str, str]
    raw: bytes
    broken: bool = False

    @property
    def value(self) -> Any:
        return json.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        found = []
        for piece in self.raw.split(b"\n\n"):
            if piece.strip():
                assert piece.startswith(b"data: "), piece
                text = piece[6:].decode()
                found.append(text if text == "[DONE]" else json.loads(text))
        return found


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: Any = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> Reply:
    """Ask, and take the whole answer, also one that breaks off."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | (headers or {})
    async with session.request(method, url, data=data, headers=headers) as response:
        raw, broken = b"", False
        try:
            async for piece in response.content.iter_any():
                raw += piece
        except aiohttp.ClientPayloadError:
            broken = True
        found = {name.lower(): value for name, value in response.headers.items()}
        return Reply(response.status, found, raw, broken)


@dataclass
class Layout:
    """Engines, the proxy, and one more engine to ask directly."""

    proxy: Proxy
    prefillers: list[MockEngine]
    decoders: list[MockEngine]
    direct: MockEngine
    session: aiohttp.ClientSession

    async def ask(
        self,
        body: Any = None,
        path: str = "/v1/completions",
        *,
        port: int | None = None,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """Ask the proxy, or whoever listens on `port`."""
        url = f"http://127.0.0.1:{port or self.proxy.port}{path}"
        return await ask(self.session, url, body, method=method, headers=headers)

    async def both(self, body: Any, path: str = "/v1/completions") -> tuple[Reply, Reply]:
        """The proxy's and the direct engine's answer to one request."""
        return await self.ask(body, path), await self.ask(body, path, port=self.direct.port)

    async def until(self, true: Any) -> None:
        """Wait for something that must come about (the test's own limit ends it otherwise)."""
        while not true():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def layout(
    mode: str,
    *,
    first_token: str = "decoder",
    prefills: int = 1,
    decodes: int = 1,
    ranks: int = 1,
    limits: Limits = LIMITS,
    **more: Any,
) -> AsyncIterator[Layout]:
    """A layout that is up."""
    world = World()
    prefillers = [MockEngine(world, f"prefill{i}") for i in range(prefills if mode != "round-robin" else 0)]
    decoders = []
    for i in range(decodes):
        ports = tuple(7300 + 10 * i + rank for rank in range(ranks)) if mode == "lmcache" else ()
        decoders.append(MockEngine(world, f"decode{i}", ports))
    direct = MockEngine(World(), "direct")
    every = [*prefillers, *decoders, direct]
    for engine in every:
        await engine.start()
    options = Options(
        mode=mode,
        port=0,
        prefillers=tuple(EngineAddress("127.0.0.1", engine.port) for engine in prefillers),
        decoders=tuple(
            EngineAddress("127.0.0.1", e.port, e.init_ports, tuple(p + 100 for p in e.init_ports))
            for e in decoders
        ),
        notify_port=0,
        first_token=first_token,
        limits=limits,
        **more,
    )
    proxy = Proxy(options)
    await proxy.start()
    for engine in prefillers:
        engine.notify_address = f"127.0.0.1:{proxy.notify_port}"
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Layout(proxy, prefillers, decoders, direct, session)
    finally:
        await proxy.stop()
        for engine in every:
            await engine.stop()
