# SPDX-License-Identifier: Apache-2.0
"""A mock engine that streams at a steady pace; each event carries the time at which it was written.

    python paced_engine.py --port 9001 --tokens 500 --interval-ms 10

Any completion request gets `--tokens` events (or its `max_tokens`), in vLLM's form and size. A prefill of either
hand-over gets its reply after `--prefill-ms`; with an LMCache prefill the KV notification follows, unless
`--lose-kv`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import resource
import time
from typing import Any

import httptools
import msgspec
import orjson
import uvloop
import zmq as untyped_zmq

zmq: Any = untyped_zmq  # its stubs lean on names that the type checker does not follow

HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Tue, 01 Dec 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = (
    b'data: {"id":"cmpl-%b","object":"text_completion","created":1796000000,"model":"mock","choices":[{"index":'
    b'0,"text":" %020d","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}],'
    b'"usage":null}\n\n'
)
USAGE = (
    b'data: {"id":"cmpl-%b","object":"text_completion","created":1796000000,"model":"mock","choices":[],'
    b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n'
)
KV: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_block_ids": [1, 2, 3],
}
KV |= {"remote_host": "127.0.0.1", "remote_port": 5600}


class Connection(asyncio.Protocol):
    """One connection; one stream at a time."""

    options: argparse.Namespace
    push: Any = None
    streams = itertools.count()

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.timer: asyncio.TimerHandle | None = None
        self.loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.write = transport.write  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.body, self.url = b"", b""
        self.request_id = b"bench"

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self.request_id = value

    def on_body(self, body: bytes) -> None:
        self.body += body

    def json(self, value: object) -> None:
        body = orjson.dumps(value)
        self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )

    def on_message_complete(self) -> None:
        if self.parser.get_method() != b"POST":
            self.json({"object": "list", "data": [{"id": "mock", "object": "model"}], "status": "ok"})
            return
        fields = orjson.loads(self.body)
        params = fields.get("kv_transfer_params") or {}
        if params.get("do_remote_decode") or "disagg_spec" in params:
            self.loop.call_later(self.options.prefill_ms / 1000, self.prefilled, params)
            return
        self.tokens = min(self.options.tokens, fields.get("max_tokens") or self.options.tokens)
        prompt = fields.get("prompt")
        self.prompt_tokens = len(prompt) if isinstance(prompt, list) else 4
        self.sent = 0
        self.write(HEAD)
        self.due = self.loop.time()
        self.tick()

    def prefilled(self, params: dict[str, Any]) -> None:
        """Answer a prefill, and notify."""
        choice: dict[str, Any] = {
            "index": 0,
            "text": " first",
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": None,
        }
        choice |= {"token_ids": [5], "prompt_token_ids": [1, 2, 3, 4]}
        spec = params.get("disagg_spec")
        reply: dict[str, Any] = {
            "id": "cmpl-" + self.request_id.decode(),
            "object": "text_completion",
            "created": 1796000000,
            "model": "mock",
            "choices": [choice],
            "kv_transfer_params": {"first_tok": 5} if spec else KV,
        }
        self.json(reply | {"usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}})
        if spec and not self.options.lose_kv:
            if Connection.push is None:
                Connection.push = zmq.Context.instance().socket(zmq.PUSH)
                Connection.push.connect(f"tcp://{self.options.notify}")
            for _ in spec["receiver_init_port"]:
                Connection.push.send(msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": spec["req_id"]}))

    def tick(self) -> None:
        event = EVENT % (self.request_id, time.perf_counter_ns())
        self.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.sent += 1
        if self.sent < self.tokens:
            self.due += self.options.interval_ms / 1000
            self.timer = self.loop.call_at(self.due, self.tick)
            return
        counts = (self.prompt_tokens, self.prompt_tokens + self.tokens, self.tokens)
        for event in (USAGE % (self.request_id, *counts), b"data: [DONE]\n\n"):
            self.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.write(b"0\r\n\r\n")


async def serve(options: argparse.Namespace) -> None:
    Connection.options = options
    server = await asyncio.get_running_loop().create_server(
        Connection, "127.0.0.1", options.port, backlog=4096
    )
    gc.collect()
    gc.freeze()
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--interval-ms", type=float, default=10)
    parser.add_argument("--prefill-ms", type=float, default=0)
    parser.add_argument(
        "--notify", default="127.0.0.1:7500", help="host:port of the proxy's KV notifications"
    )
    parser.add_argument("--lose-kv", action="store_true", help="never notify")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
