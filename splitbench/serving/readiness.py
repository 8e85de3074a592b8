# SPDX-License-Identifier: Apache-2.0
"""Is this engine up, is it the one that we started, and does the whole layout answer?

A small HTTP client on asyncio's streams: no thread, no pool, no proxy settings, and light enough for a
process that must stay idle beside a measurement.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROBE_TOKENS = 16
# In PD: enough to fill a block or a chunk of every connector (128 on CPU, 256 in LMCache), so that KV moves.
TRANSFER_TOKENS = 300
PROBE_LIMIT_S = 300.0


@dataclass(frozen=True)
class Answer:
    """An HTTP answer; status 0 when there was none, with the reason in `text`."""

    status: int
    text: str
    refused: bool = False  # nobody listens

    def json(self) -> Any:
        """The body as JSON; None when it is not."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None


async def ask(
    host: str, port: int, path: str, *, body: Any = None, limit_s: float = 5.0, method: str | None = None
) -> Answer:
    """One request on its own connection; never raises for what the other side does."""
    try:
        async with asyncio.timeout(limit_s):
            return await _ask(
                reachable(host), port, path, body, method or ("GET" if body is None else "POST")
            )
    except TimeoutError:
        return Answer(0, f"no answer within {limit_s:g} s")
    except ConnectionRefusedError as error:
        return Answer(0, str(error), refused=True)
    except (OSError, asyncio.IncompleteReadError, ValueError, IndexError) as error:
        return Answer(0, str(error) or type(error).__name__)


def reachable(host: str) -> str:
    """The address to reach a server at that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


async def _ask(host: str, port: int, path: str, body: Any, method: str) -> Answer:
    reader, writer = await asyncio.open_connection(host, port, limit=2**20)
    try:
        payload = b"" if body is None else json.dumps(body).encode()
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        headers: dict[str, str] = {}
        while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip().lower()
        if headers.get("transfer-encoding") == "chunked":
            data = b""
            while size := int((await reader.readline()).split(b";")[0], 16):
                data += await reader.readexactly(size)
                await reader.readline()
        elif "content-length" in headers:
            data = await reader.readexactly(int(headers["content-length"]))
        else:
            data = await reader.read()
        return Answer(status, data.decode("utf-8", errors="replace"))
    finally:
        writer.close()


def model_ids(answer: Answer) -> list[str]:
    """Names that a /v1/models answer lists."""
    content = answer.json()
    cards = content.get("data", []) if isinstance(content, dict) else []
    return [str(card.get("id")) for card in cards if isinstance(card, dict)]


async def complete(
    host: str, port: int, model: str, number: int, tokens: int, limit_s: float = PROBE_LIMIT_S
) -> str | None:
    """One short greedy completion through the front door; None when it is right, else what was wrong.

    `number` makes the prompt differ from those of other numbers from its first token on.
    """
    prompt = [(17 + 3 * number + index) % 251 + 100 for index in range(tokens)]
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    answer = await ask(host, port, "/v1/completions", body=body, limit_s=limit_s)
    if answer.status == 0:
        return answer.text
    if answer.status != 200:
        return f"HTTP {answer.status}: {' '.join(answer.text.split())[:300]}"
    content = answer.json()
    choices = content.get("choices") if isinstance(content, dict) else None
    if not choices or "text" not in choices[0]:
        return f"an answer without a completion: {' '.join(answer.text.split())[:300]}"
    made = (content.get("usage") or {}).get("completion_tokens")
    return None if made is None or made >= 1 else "a completion of no tokens"


_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)", re.MULTILINE)


def transferred_tokens(metrics: str) -> float | None:
    """Prompt tokens that came to an engine from another one, by its /metrics; None when it doesn't say."""
    by_source: float | None = None
    hits: float | None = None
    for sample in _SAMPLE.finditer(metrics):
        name, labels = sample["name"], sample["labels"] or ""
        if name == "vllm:prompt_tokens_by_source_total" and 'source="external_kv_transfer"' in labels:
            by_source = (by_source or 0.0) + float(sample["value"])
        elif name == "vllm:external_prefix_cache_hits_total":
            hits = (hits or 0.0) + float(sample["value"])
    return hits if by_source is None else by_source


# LMCache colours its log, so anything may stand between the words.
_RETRIEVED = re.compile(r"LMCache INFO:.*\bRetrieved (\d+) out of \d+\b")


def retrieved_tokens(log: str) -> int:
    """Tokens that an engine with LMCache inside has loaded, by its log.

    Its counters tell of hits, and stacks were seen that report every hit and load nothing.
    """
    return sum(int(match[1]) for match in _RETRIEVED.finditer(log))


async def accepts(socket: Path) -> bool:
    """True when a process answers connections on a Unix socket."""
    try:
        _, writer = await asyncio.open_unix_connection(str(socket))
    except OSError:
        return False
    writer.close()
    return True


async def until(
    condition: Callable[[], Awaitable[bool]],
    limit_s: float,
    waiting: Callable[[float], None],
    *,
    every_s: float = 15.0,
) -> None:
    """Await `condition()` again and again until it holds; report the wait every `every_s`.

    Polls fast at first, for engines that start in no time, and calmly later.

    Raises:
        TimeoutError: `limit_s` passed.
    """
    loop = asyncio.get_running_loop()
    begun = reported = loop.time()
    while not await condition():
        now = loop.time()
        if now - begun > limit_s:
            raise TimeoutError
        if now - reported >= every_s:
            reported = now
            waiting(now - begun)
        await asyncio.sleep(0.03 if now - begun < 3.0 else 0.25)


def pairs_to_probe(kind: str, roles: Iterable[str]) -> int:
    """How many completions touch every engine, and in PD (under round-robin) every pair that will be used."""
    counts = list(roles)
    if kind == "pd":
        return math.lcm(max(1, counts.count("prefill")), max(1, counts.count("decode")))
    return len(counts)
