# SPDX-License-Identifier: Apache-2.0
"""The load: streams on raw sockets, which notes when bytes came and looks at them afterwards."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import uvloop

WRITTEN = re.compile(rb'"text":" (\d{20})"')


class Stream(asyncio.Protocol):
    """One streamed request."""

    def __init__(self, body: bytes, done: asyncio.Future[None]) -> None:
        self.body = body
        self.done = done
        self.pieces: list[bytes] = []
        self.times_ns: list[int] = []
        self.sent_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.sent_ns = time.perf_counter_ns()
        transport.write(  # type: ignore[attr-defined]
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(self.body), self.body)
        )

    def data_received(self, data: bytes) -> None:
        self.times_ns.append(time.perf_counter_ns())
        self.pieces.append(data)
        if data.endswith(b"\r\n0\r\n\r\n") or data == b"0\r\n\r\n":
            self.finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.finish()

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
            self.transport.abort()  # type: ignore[attr-defined]


@dataclass
class Load:
    """What one run saw. Times in ms."""

    streams: int
    tokens: int = 0
    complete: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    latency_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    stretch_ms: list[float] = field(default_factory=list)
    error: str = ""

    def quantiles(self) -> dict[str, float]:
        """Of the time to the first token, a token's way from engine to client, and its gap to the one before."""
        found = {}
        for name in ("ttft_ms", "latency_ms", "gap_ms", "stretch_ms"):
            values = getattr(self, name)
            for q in (50, 99):
                found[f"{name}_p{q}"] = round(float(np.percentile(values, q)), 3) if values else float("nan")
        found["gap_ms_max"] = round(max(self.gap_ms, default=float("nan")), 3)
        return found


def examine(stream: Stream, load: Load, expected: int) -> None:
    """Read one stream: when each token was written, and when it came."""
    ends = np.cumsum([len(piece) for piece in stream.pieces])
    text = b"".join(stream.pieces)
    written, came = [], []
    for match in WRITTEN.finditer(text):
        written.append(int(match[1]))
        came.append(stream.times_ns[bisect_left(ends, match.end())])
    load.tokens += len(written)
    load.complete += len(written) == expected and b"data: [DONE]" in text
    if not came:
        load.error = load.error or text[:200].decode("utf-8", "replace")
        return
    load.ttft_ms.append((came[0] - stream.sent_ns) / 1e6)
    load.latency_ms += [(c - w) / 1e6 for c, w in zip(came, written, strict=True)]
    gaps = [(b - a) / 1e6 for a, b in pairwise(came)]
    load.gap_ms += gaps
    # How much longer a gap was for the client than for the engine.
    load.stretch_ms += [gap - (b - a) / 1e6 for gap, (a, b) in zip(gaps, pairwise(written), strict=True)]


async def _load(port: int, streams: int, body: bytes, expected: int, limit_s: float, ramp_s: float) -> Load:
    loop = asyncio.get_running_loop()
    protocols, waits = [], []
    gc.collect()
    gc.disable()
    for _ in range(streams):
        done = loop.create_future()
        stream = Stream(body, done)
        protocols.append(stream)
        waits.append(done)
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)
        await asyncio.sleep(ramp_s / streams)
    await asyncio.wait(waits, timeout=limit_s)
    gc.enable()
    load = Load(streams)
    for stream in protocols:
        examine(stream, load, expected)
        stream.finish()
    return load


def run_load(
    port: int, streams: int, body: bytes, expected: int, limit_s: float, ramp_s: float = 1.0
) -> Load:
    """Open `streams` streams within `ramp_s` seconds, and read them to their end or for `limit_s` seconds."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_load(port, streams, body, expected, limit_s, ramp_s))
