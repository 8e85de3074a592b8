# SPDX-License-Identifier: Apache-2.0
"""A warm client that does nothing: it opens a Unix socket when it is ready, and stays."""

from __future__ import annotations

import asyncio
import sys


async def _serve(path: str) -> None:
    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(connection, path)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
