# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve` of the stub: real requests, measured, in a result file of vLLM 0.32's form."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """The options of the real command that the workflow has a use for; any other is refused, as there."""
    add = parser.add_argument
    add("--backend", default="openai")
    add("--base-url")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", default="/v1/completions")
    add("--model")
    add("--served-model-name")
    add("--tokenizer")
    add("--tokenizer-mode", default="auto")
    add("--trust-remote-code", action="store_true")
    add("--dataset-name", default="random", choices=["random"])
    add("--random-input-len", "--input-len", type=int, default=1024)
    add("--random-output-len", "--output-len", type=int, default=128)
    add("--random-range-ratio", type=float, default=0.0)
    add("--random-prefix-len", type=int, default=0)
    add("--num-prompts", type=int, default=1000)
    add("--num-warmups", type=int, default=0)
    add("--max-concurrency", type=int)
    add("--request-rate", type=float, default=math.inf)
    add("--burstiness", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--ignore-eos", action="store_true")
    add("--temperature", type=float)
    add("--extra-body", type=json.loads)
    add("--ready-check-timeout-sec", type=int, default=0)
    add("--disable-tqdm", action="store_true")
    add("--disable-shuffle", action="store_true")
    add("--percentile-metrics", default="ttft,tpot,itl")
    add("--metric-percentiles", default="99")
    add("--label")
    add("--request-id-prefix", default="bench-")
    add("--metadata", nargs="*", metavar="KEY=VALUE")
    add("--save-result", action="store_true")
    add("--save-detailed", action="store_true")
    add("--result-dir")
    add("--result-filename")


@dataclass
class Outcome:
    """What came of one request; times in seconds."""

    input_len: int = 0
    output_len: int = 0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    start: float = 0.0
    queued: float = 0.0
    text: str = ""
    error: str = ""


def make_prompts(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """(text, input tokens, output tokens) per request; a token is a word, as in the stub's server."""
    source = random.Random(options.seed)

    def around(length: int) -> int:
        ratio = options.random_range_ratio
        return source.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio)))

    prompts = []
    for _ in range(options.num_prompts):
        words, made, first = (
            around(options.random_input_len),
            around(options.random_output_len),
            source.random(),
        )
        offset = int(first * 1e9)
        prefix = [f"p{i}" for i in range(options.random_prefix_len)]
        text = " ".join([*prefix, *(f"w{(offset + i) % 1_000_003}" for i in range(words))])
        prompts.append((text, words + len(prefix), made))
    return prompts


class Connection:
    """One kept HTTP connection."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, payload: Any = None, headers: str = "") -> tuple[int, Any]:
        """Send; return the status and an asynchronous iterator over the pieces of the body."""
        if self.streams is None or self.streams[0].at_eof():
            self.streams = await asyncio.open_connection(self.host, self.port)
        reader, writer = self.streams
        body = b"" if payload is None else json.dumps(payload).encode()
        writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\ncontent-type: application/json\r\n"
            f"{headers}content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        words = (await reader.readline()).split(b" ")
        if len(words) < 2:
            raise ConnectionError("server disconnected")
        got: dict[str, str] = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            got[name.strip().lower()] = value.strip().lower()
        return int(words[1]), self._body(reader, got)

    @staticmethod
    async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> Any:
        if headers.get("transfer-encoding") != "chunked":
            yield await reader.readexactly(int(headers.get("content-length", 0)))
            return
        while size := int((await reader.readline()).strip() or b"0", 16):
            yield await reader.readexactly(size)
            await reader.readline()
        await reader.readline()

    def close(self) -> None:
        """Drop the connection, so that nothing of a failed answer is read by the next request."""
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


async def one_request(
    connection: Connection, options: argparse.Namespace, name: str, prompt: tuple[str, int, int], number: int
) -> Outcome:
    """Stream one completion and time its chunks."""
    text, input_len, output_len = prompt
    outcome = Outcome(input_len=input_len)
    payload = {
        "model": name,
        "prompt": text,
        "max_tokens": output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": options.ignore_eos,
        **({"temperature": options.temperature} if options.temperature is not None else {}),
        **(options.extra_body or {}),
    }
    outcome.start = last = time.perf_counter()
    try:
        header = f"x-request-id: {options.request_id_prefix}{number}\r\n"
        status, body = await connection.ask("POST", options.endpoint, payload, header)
        pending = b""
        async for piece in body:
            now = time.perf_counter()
            pending += piece
            if status != 200:
                continue
            while b"\n\n" in pending:
                event, _, pending = pending.partition(b"\n\n")
                data = event.removeprefix(b"data: ").strip()
                if not data or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RuntimeError(str(chunk["error"]))
                if chunk.get("choices"):
                    if outcome.ttft == 0.0:
                        outcome.ttft = now - outcome.start
                    else:
                        outcome.itls.append(now - last)
                    last = now
                    outcome.text += chunk["choices"][0]["text"]
                if usage := chunk.get("usage"):
                    outcome.input_len = usage["prompt_tokens"]
                    outcome.output_len = usage["completion_tokens"]
        if status != 200:
            raise RuntimeError(f"{status}: {pending.decode(errors='replace')}")
        if outcome.ttft == 0.0:
            raise RuntimeError("Never received a valid chunk to calculate TTFT.")
        outcome.latency = last - outcome.start
        return outcome
    except Exception:
        connection.close()
        return Outcome(input_len=input_len, start=outcome.start, error=traceback.format_exc())


def summary(
    options: argparse.Namespace, outcomes: list[Outcome], duration: float, name: str
) -> dict[str, Any]:
    """The result file's content."""
    good = [o for o in outcomes if not o.error]
    made, read = sum(o.output_len for o in good), sum(o.input_len for o in good)
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": name,
        "tokenizer_id": options.tokenizer or options.model,
        "num_prompts": options.num_prompts,
    }
    for pair in options.metadata or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SystemExit("Invalid metadata format. Please use KEY=VALUE format.")
        result[key.strip()] = value.strip()
    seconds = duration or 1e-9
    result |= {
        "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": len(good) / seconds,
        "request_goodput": None,
        "output_throughput": made / seconds,
        "total_token_throughput": (made + read) / seconds,
    }
    if options.save_detailed:
        result |= {
            "input_lens": [o.input_len for o in outcomes],
            "output_lens": [o.output_len for o in outcomes],
            "ttfts": [o.ttft for o in outcomes],
            "itls": [o.itls for o in outcomes],
            "latencies": [o.latency for o in outcomes],
            "start_times": [o.start for o in outcomes],
            "queue_times": [o.queued for o in outcomes],
            "generated_texts": [o.text for o in outcomes],
            "errors": [o.error for o in outcomes],
        }
    result |= {
        "max_output_tokens_per_s": made / seconds,
        "max_concurrent_requests": min(options.num_prompts, options.max_concurrency or options.num_prompts)
        + 2,
        "rtfx": 0.0,
    }
    values = {
        "ttft": [o.ttft for o in good],
        "tpot": [(o.latency - o.ttft) / (o.output_len - 1) for o in good if o.output_len > 1],
        "itl": [itl for o in good for itl in o.itls],
        "e2el": [o.latency for o in good],
    }
    for metric in options.percentile_metrics.split(","):
        numbers = sorted(1e3 * value for value in values.get(metric, []))
        mean = sum(numbers) / len(numbers) if numbers else 0.0
        spread = math.sqrt(sum((n - mean) ** 2 for n in numbers) / len(numbers)) if numbers else 0.0
        result[f"mean_{metric}_ms"] = mean
        result[f"median_{metric}_ms"] = quantile(numbers, 50.0)
        result[f"std_{metric}_ms"] = spread
        for percentile in options.metric_percentiles.split(","):
            result[f"p{percentile}_{metric}_ms"] = quantile(numbers, float(percentile))
    return result


def quantile(ordered: list[float], percentile: float) -> float:
    """Linear interpolation between order statistics; 0.0 for none, as the real tool prints."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percentile / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


async def main_async(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark; return what is (or would be) saved."""
    base = urlsplit(args.base_url or f"http://{args.host}:{args.port}")
    host, port = base.hostname or "127.0.0.1", base.port or 80
    name = args.served_model_name or args.model
    if name is None:
        _, body = await Connection(host, port).ask("GET", "/v1/models")
        name = json.loads(b"".join([piece async for piece in body]))["data"][0]["id"]
    prompts = make_prompts(args)
    if args.ready_check_timeout_sec > 0:
        deadline = time.monotonic() + args.ready_check_timeout_sec
        while (await one_request(Connection(host, port), args, name, prompts[0], 0)).error:
            if time.monotonic() > deadline:
                raise ValueError(
                    "Initial test run failed - Please make sure benchmark arguments are correct."
                )
            await asyncio.sleep(0.2)
    for number in range(args.num_warmups):
        await one_request(Connection(host, port), args, name, prompts[0], number)
    idle: list[Connection] = []
    limit = asyncio.Semaphore(args.max_concurrency or len(prompts))
    arrivals = random.Random(args.seed + 1)

    async def measured(number: int) -> Outcome:
        came = time.perf_counter()
        async with limit:
            queued = time.perf_counter() - came
            connection = idle.pop() if idle else Connection(host, port)
            outcome = await one_request(connection, args, name, prompts[number], number)
            outcome.queued = queued
            idle.append(connection)
            return outcome

    begun, tasks = time.perf_counter(), []
    for number in range(len(prompts)):
        tasks.append(asyncio.ensure_future(measured(number)))
        if math.isfinite(args.request_rate):
            shape = args.burstiness
            await asyncio.sleep(arrivals.gammavariate(shape, 1.0 / (args.request_rate * shape)))
    outcomes = list(await asyncio.gather(*tasks))
    duration = time.perf_counter() - begun
    for connection in idle:
        connection.close()
    return summary(args, outcomes, duration, name)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Run, print a short summary, save where asked."""
    result = asyncio.run(main_async(args))
    sys.stdout.write(f"Successful requests: {result['completed']}\nFailed requests: {result['failed']}\n")
    if args.save_result:
        name = (
            args.result_filename
            or f"{args.label or args.backend}-{args.request_rate}qps-{result['date']}.json"
        )
        path = Path(args.result_dir or ".") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
    return result


def command_line(arguments: list[str]) -> int:
    """`vllm bench serve ...`; exit code 0 even when requests failed, as in the real tool."""
    parser = argparse.ArgumentParser(prog="vllm bench serve", allow_abbrev=False)
    add_cli_args(parser)
    main(parser.parse_args(arguments))
    return 0
