# SPDX-License-Identifier: Apache-2.0
"""A front door for stubbed engines: just enough of a proxy to bring a layout of several engines up in tests.

`--servers URL,...` spreads requests in turn; `--prefill URL,... --decode URL,...` does NixlConnector's two
steps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
from typing import Any
from urllib.parse import urlsplit


async def forward(
    url: str, method: str, path: str, body: bytes, answer: asyncio.StreamWriter | None
) -> bytes:
    """One request to an engine; its raw reply goes to `answer` as it comes, or is returned."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(
        f"{method} {path} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    whole = b""
    try:
        while data := await reader.read(65536):
            if answer is None:
                whole += data
            else:
                answer.write(data)
                await answer.drain()
    finally:
        writer.close()
    return whole


def status(raw: bytes) -> int:
    """The status of a raw reply; 502 for none."""
    with contextlib.suppress(IndexError, ValueError):
        return int(raw.split(b" ", 2)[1])
    return 502


async def serve(options: argparse.Namespace) -> None:
    """Accept connections until killed; one request per connection, as its replies say."""
    prefills = itertools.cycle(options.prefill)
    workers = itertools.cycle(options.decode or options.servers)
    engines = [*options.prefill, *options.decode, *options.servers]

    async def healthy() -> bool:
        try:
            return all([status(await forward(url, "GET", "/health", b"", None)) == 200 for url in engines])
        except OSError:
            return False

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ValueError):
            method, target, _ = (await reader.readline()).decode().split(" ", 2)
            length = 0
            while (line := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = line.decode("latin-1").partition(":")
                length = int(value) if name.lower() == "content-length" else length
            body = await reader.readexactly(length)
            try:
                await route(method, target, body, writer)
            except OSError as error:
                text = json.dumps({"error": str(error)}).encode()
                head = f"HTTP/1.1 502 Bad Gateway\r\nconnection: close\r\ncontent-length: {len(text)}\r\n\r\n"
                writer.write(head.encode() + text)
        writer.close()

    async def route(method: str, target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if target == "/health":
            words = b"200 OK" if await healthy() else b"503 Unavailable"
            writer.write(b"HTTP/1.1 " + words + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            return
        if method == "POST" and options.prefill and target.startswith("/v1/"):
            ask: dict[str, Any] = json.loads(body)
            empty = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
            first = {**ask, "max_tokens": 1, "stream": False}
            first.pop("stream_options", None)
            first["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False, **empty}
            raw = await forward(next(prefills), "POST", target, json.dumps(first).encode(), None)
            if status(raw) != 200:
                writer.write(raw)
                return
            reply = json.loads(raw.partition(b"\r\n\r\n")[2])
            if not options.forget_transfer:
                ask["kv_transfer_params"] = reply["kv_transfer_params"]
            body = json.dumps(ask).encode()
        await forward(next(workers), method, target, body, writer)

    server = await asyncio.start_server(connection, options.host, options.port)
    await server.serve_forever()


def urls(text: str) -> list[str]:
    """A comma list."""
    return [part for part in text.split(",") if part]


def main() -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--servers", type=urls, default=[])
    parser.add_argument("--prefill", type=urls, default=[])
    parser.add_argument("--decode", type=urls, default=[])
    parser.add_argument(
        "--forget-transfer", action="store_true", help="lose the prefiller's answer: KV never moves"
    )
    asyncio.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
