# SPDX-License-Identifier: Apache-2.0
"""The limit of the ratios: a relay that copies bytes between two sockets and knows nothing of HTTP.

    python benchmarks/proxy/byte_relay.py --port 9002 --engine 9001

Same event loop as the proxy's. It fails no request early, counts nothing, keeps no time limit: what it spends on a
chunk is what the loop and the kernel's two calls cost.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import cast

import uvloop


class Half(asyncio.Protocol):
    """One side of a connection; what arrives is written to the other side."""

    def __init__(self, other: Half | None = None) -> None:
        self.other = other
        self.transport: asyncio.Transport | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)
        else:
            self.early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class Front(Half):
    """The client's side: dials the engine at once."""

    def __init__(self, engine: int) -> None:
        super().__init__()
        self.engine = engine
        self.dialling: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.dialling = asyncio.get_running_loop().create_task(self._dial())

    async def _dial(self) -> None:
        loop = asyncio.get_running_loop()
        dialled, self.other = await loop.create_connection(lambda: Half(self), "127.0.0.1", self.engine)
        for data in self.early:
            dialled.write(data)


async def serve(port: int, engine: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Front(engine), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", type=int, required=True)
    given = parser.parse_args()
    uvloop.run(serve(given.port, given.engine))
