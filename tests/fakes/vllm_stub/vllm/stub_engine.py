# SPDX-License-Identifier: Apache-2.0
"""What the stub has in place of a model: one loop that prefills and decodes, as slow as it is told to be.

Like a real engine it is one resource: while a prompt is prefilled nobody's next token is made, so the effect
that disaggregation removes is there to be seen. A token is a word. The answer depends on the whole prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from vllm.behaviour import Behaviour


@dataclass
class Request:
    """One completion under way; `tokens` gets each word, then None."""

    prompt: list[Any]
    max_tokens: int
    transfer: dict[str, Any] | None
    tokens: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    made: int = 0
    reply_transfer: dict[str, Any] | None = None
    cancelled: bool = False


class Counters:
    """The counters of /metrics."""

    def __init__(self) -> None:
        self.prompt = 0
        self.generation = 0
        self.cache_queries = 0
        self.cache_hits = 0
        self.external_queries = 0
        self.external_hits = 0
        self.by_source = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        self.moved_bytes = 0
        self.transfers = 0
        self.finished = 0


class Engine:
    """The loop, the prefix cache and, for NixlConnector, the store of prompts that a decoder may pull."""

    BYTES_PER_TOKEN = 1024

    def __init__(self, behaviour: Behaviour, prefix_caching: bool, side_host: str, side_port: int) -> None:
        self.behaviour = behaviour
        self.prefix_caching = prefix_caching
        self.side_host, self.side_port = side_host, side_port
        self.identity = str(uuid.uuid4())
        self.counters = Counters()
        self.cache: set[int] = set()
        self.held: dict[str, int] = {}
        self.pulls = 0
        self.waiting: asyncio.Queue[Request] = asyncio.Queue()
        self.running: list[Request] = []

    # -- the KV store of a prefiller, as a one-line TCP protocol in place of NIXL ----------------------------
    async def serve_side_channel(self) -> None:
        """Let decoders pull; the port is bound even when nobody ever does, as in vLLM."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, ConnectionError):
                name = (await reader.readline()).decode().strip()
                writer.write(f"{self.held.pop(name, 0)}\n".encode())
                await writer.drain()
            writer.close()

        await asyncio.start_server(answer, self.side_host, self.side_port)

    async def _pull(self, transfer: dict[str, Any]) -> int:
        try:
            reader, writer = await asyncio.open_connection(transfer["remote_host"], transfer["remote_port"])
            writer.write(f"{transfer['remote_request_id']}\n".encode())
            tokens = int(await reader.readline())
            writer.close()
            return tokens
        except (OSError, KeyError, TypeError, ValueError):
            return 0

    # -- the loop --------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Prefill what waits, then one step for all that run, for ever."""
        while True:
            if not self.running:
                self.running.append(await self._prefilled(await self.waiting.get()))
            while not self.waiting.empty():
                self.running.append(await self._prefilled(self.waiting.get_nowait()))
            for request in self.running:
                request.tokens.put_nowait(self._token(request))
                request.made += 1
                self.counters.generation += 1
                if request.made >= request.max_tokens:
                    request.tokens.put_nowait(None)
                    self.counters.finished += 1
            self.running = [r for r in self.running if r.made < r.max_tokens and not r.cancelled]
            await self._spend(self.behaviour.step_ms / 1e3)

    @staticmethod
    async def _spend(seconds: float) -> None:
        await asyncio.sleep(seconds)

    @staticmethod
    def _token(request: Request) -> str:
        seed = zlib.crc32(repr(request.prompt).encode())
        return f" t{(seed * 31 + request.made * 7919) % 32000}"

    def _cached(self, prompt: list[Any]) -> int:
        """Tokens of the leading full blocks that are cached; this prompt's blocks are cached from now on."""
        if not self.prefix_caching:
            return 0
        size, chain, hits, missed = self.behaviour.block_size, 0, 0, False
        for start in range(0, len(prompt) - size + 1, size):
            chain = hash((chain, tuple(prompt[start : start + size])))
            missed = missed or chain not in self.cache
            hits += 0 if missed else size
            self.cache.add(chain)
        return min(hits, len(prompt) - 1)

    async def _prefilled(self, request: Request) -> Request:
        total, counters = len(request.prompt), self.counters
        external = 0
        transfer = request.transfer or {}
        if transfer.get("do_remote_prefill"):
            external = await self._pull(transfer)
            counters.external_queries += total
            counters.external_hits += external
            self.pulls += 1
            if self.behaviour.broken_transfer or 0 <= self.behaviour.broken_after < self.pulls:
                external = 0
            counters.by_source["external_kv_transfer"] += external
            counters.moved_bytes += external * self.BYTES_PER_TOKEN
            counters.transfers += 1 if external else 0
        cached = 0
        if self.prefix_caching:
            cached = self._cached(request.prompt)
            counters.cache_queries += total
            counters.cache_hits += cached
        cached = min(cached, total - external)
        computed = total - external - cached
        counters.by_source["local_cache_hit"] += cached
        counters.by_source["local_compute"] += computed
        counters.prompt += total
        await self._spend(computed * self.behaviour.prefill_us_per_token / 1e6)
        if transfer.get("do_remote_decode"):
            name = uuid.uuid4().hex
            self.held[name] = total
            request.reply_transfer = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [list(range(-(-total // self.behaviour.block_size)))],
                "remote_engine_id": self.identity,
                "remote_request_id": name,
                "remote_host": self.side_host,
                "remote_port": self.side_port,
                "tp_size": 1,
            }
        return request

    async def generate(self, request: Request) -> AsyncIterator[str]:
        """Words of the answer as they are made."""
        self.waiting.put_nowait(request)
        try:
            while (word := await request.tokens.get()) is not None:
                yield word
        finally:
            request.cancelled = True

    def metrics(self, model: str) -> str:
        """The counters in Prometheus' text format, under vLLM's names."""
        c, label = self.counters, f'engine="0",model_name="{model}"'
        rows: list[tuple[str, str, str, float]] = [
            ("num_requests_running", "gauge", "", len(self.running)),
            ("num_requests_waiting", "gauge", "", self.waiting.qsize()),
            ("kv_cache_usage_perc", "gauge", "", 0.0),
            ("prompt_tokens", "counter", "", c.prompt),
            ("generation_tokens", "counter", "", c.generation),
            ("prefix_cache_queries", "counter", "", c.cache_queries),
            ("prefix_cache_hits", "counter", "", c.cache_hits),
            ("external_prefix_cache_queries", "counter", "", c.external_queries),
            ("external_prefix_cache_hits", "counter", "", c.external_hits),
            *(("prompt_tokens_by_source", "counter", f',source="{k}"', v) for k, v in c.by_source.items()),
            ("num_preemptions", "counter", "", 0),
            ("request_success", "counter", ',finished_reason="length"', c.finished),
        ]
        lines, seen, now = [], set(), time.time()
        for name, kind, extra, value in rows:
            if name not in seen:
                seen.add(name)
                lines += [f"# HELP vllm:{name} Stub.", f"# TYPE vllm:{name} {kind}"]
            suffix = "_total" if kind == "counter" else ""
            lines.append(f"vllm:{name}{suffix}{{{label}{extra}}} {float(value)}")
            if kind == "counter":
                lines.append(f"vllm:{name}_created{{{label}{extra}}} {now}")
        if self.side_port:
            lines += [
                "# HELP vllm:nixl_bytes_transferred Stub.",
                "# TYPE vllm:nixl_bytes_transferred histogram",
                f'vllm:nixl_bytes_transferred_bucket{{{label},le="+Inf"}} {float(c.transfers)}',
                f"vllm:nixl_bytes_transferred_count{{{label}}} {float(c.transfers)}",
                f"vllm:nixl_bytes_transferred_sum{{{label}}} {float(c.moved_bytes)}",
            ]
        return "\n".join(lines) + "\n"
