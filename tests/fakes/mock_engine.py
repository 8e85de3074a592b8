# SPDX-License-Identifier: Apache-2.0
"""A programmable engine without a model: answers as vLLM's OpenAI server does, and fails as it is told to.

The next token is a hash of all tokens before it, so that a lost or doubled token changes the rest of the
answer. KV is a ledger: what a prefill holds, what a decoder's buffer holds, what was moved. `World` joins
engines that move KV.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec
import zmq

MODEL = "mock"
VOCABULARY = 60
END_OF_SEQUENCE = 0
CONTEXT = 256


def word(token: int) -> str:
    """Text of a token; some take several bytes per character."""
    return {0: " é", 1: " 🙂", 2: " 語"}.get(token % 5, " w") + str(token)


def tokenize(text: str) -> list[int]:
    """The inverse of `word` on generated text; any other word hashes into the vocabulary."""
    tokens = []
    for piece in text.split():
        digits = piece.lstrip("é🙂語w")
        known = digits.isascii() and digits.isdigit() and word(int(digits)).strip() == piece
        tokens.append(int(digits) if known else 1 + zlib.crc32(piece.encode()) % (VOCABULARY - 1))
    return tokens


@dataclass
class Behaviour:
    """What one completion request meets. The default is a well-behaved engine."""

    delay_s: float = 0.0
    token_delay_s: float = 0.0
    status: int = 200
    refusal: str = "refused by script"
    hang: bool = False
    die_silently: bool = False
    die_after_events: int | None = None
    die_within_event: bool = False
    error_event_after: int | None = None
    raw: bytes | None = None
    reframe: Callable[[bytes], list[bytes]] | None = None
    notify: str = "all"  # all, none, error, first (one rank only)
    notify_delay_s: float = 0.0


class World:
    """Engines by name: decoders find prefills, prefills find decoders."""

    def __init__(self) -> None:
        self.engines: dict[str, MockEngine] = {}
        self.receivers: dict[int, MockEngine] = {}


@dataclass
class Seen:
    """One request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class MockEngine:
    """One engine on a port of its own (`port` after `start`)."""

    world: World = field(default_factory=World)
    name: str = "engine"
    init_ports: tuple[int, ...] = ()
    notify_address: str | None = None
    returns_token_ids: bool = True
    returns_first_tok: bool = True
    buffer_slots: int = 10**6
    default: Behaviour = field(default_factory=Behaviour)
    healthy: bool = True
    reset_status: int = 200

    def __post_init__(self) -> None:
        self.script: deque[Behaviour] = deque()
        self.seen: list[Seen] = []
        self.running = 0
        self.aborted = 0
        self.held: dict[str, list[int]] = {}
        self.buffer: list[list[int]] = []
        self.freed = asyncio.Event()
        self.moved_tokens = 0
        self.computed_tokens = 0
        self.missing_kv = 0
        self.tokenize_calls = 0
        self.connections: set[_Connection] = set()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._context: zmq.Context[Any] | None = None
        self._push: zmq.Socket[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.world.engines[self.name] = self
        for port in self.init_ports:
            self.world.receivers[port] = self

    async def start(self, port: int = 0) -> MockEngine:
        """Serve on 127.0.0.1."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Die: the port closes and every connection is reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._push is not None and self._context is not None:
            self._push.close(linger=0)
            self._context.term()
            self._push = None

    def completions(self) -> list[Seen]:
        """The completion requests seen so far."""
        return [seen for seen in self.seen if "completions" in seen.path]

    # KV

    def notify(self, request_id: str, behaviour: Behaviour, ranks: int) -> None:
        """Tell the proxy that KV is complete, as LMCache's senders do, one message per rank."""
        if self._push is None:
            self._context = zmq.Context()
            self._push = self._context.socket(zmq.PUSH)
            self._push.connect(f"tcp://{self.notify_address}")
        count = {"all": ranks, "error": 1, "first": 1, "none": 0}[behaviour.notify]
        ending = "::error" if behaviour.notify == "error" else ""
        for _ in range(count):
            self._push.send(msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": request_id + ending}))

    async def _push_kv(self, spec: dict[str, Any], prompt: list[int], behaviour: Behaviour) -> None:
        await asyncio.sleep(behaviour.notify_delay_s)
        self.notify(spec["req_id"], behaviour, len(spec["receiver_init_port"]))

    async def send_kv(self, spec: dict[str, Any], prompt: list[int], behaviour: Behaviour) -> None:
        """LMCache's sender: wait for room in the receiver's buffer, write, notify beside the answer."""
        receiver = self.world.receivers[spec["receiver_init_port"][0]]
        while len(receiver.buffer) >= receiver.buffer_slots:
            receiver.freed.clear()
            await receiver.freed.wait()
        receiver.buffer.append(prompt)
        task = asyncio.ensure_future(self._push_kv(spec, prompt, behaviour))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def held_elsewhere(self, params: dict[str, Any]) -> None:
        """Have the prefill forget KV that will not be read."""
        if params.get("do_remote_prefill"):
            self.world.engines[params["remote_engine_id"]].held.pop(params["remote_request_id"], None)

    def take_kv(self, params: dict[str, Any], prompt: list[int]) -> None:
        """A decoder looks for the prompt's KV: named by the parameters, or in its buffer."""
        if params.get("do_remote_prefill"):
            owner = self.world.engines[params["remote_engine_id"]]
            held = owner.held.pop(params["remote_request_id"], None)
            if held == prompt:
                self.moved_tokens += len(prompt)
                return
            self.missing_kv += 1
        for position, kv in enumerate(self.buffer):
            if prompt[: len(kv)] == kv:
                del self.buffer[position]
                self.freed.set()
                self.moved_tokens += len(kv)
                self.computed_tokens += len(prompt) - len(kv)
                return
        self.computed_tokens += len(prompt)


def next_token(tokens: list[int], seed: int | None, vocabulary: int = VOCABULARY) -> int:
    """The token after these."""
    return zlib.crc32(repr((tokens, seed)).encode()) % vocabulary


@dataclass
class Generation:
    """One answer: tokens, texts and why it ended."""

    tokens: list[int]
    texts: list[str]
    finish_reason: str
    stop_reason: Any = None


def generate(prompt: list[int], body: dict[str, Any], limit: int, seed: int | None) -> Generation:
    """Generate as the parameters say."""
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    tokens: list[int] = []
    texts: list[str] = []
    context = list(prompt)
    while len(tokens) < limit:
        token = next_token(context, seed)
        enough = len(tokens) >= (body.get("min_tokens") or 0)
        if not enough and token == END_OF_SEQUENCE:
            token += 1
        tokens.append(token)
        context.append(token)
        if token == END_OF_SEQUENCE and not body.get("ignore_eos"):
            texts.append("")
            return Generation(tokens, texts, "stop")
        texts.append(word(token))
        if token in (body.get("stop_token_ids") or []):
            return Generation(tokens, texts, "stop", token)
        joined = "".join(texts)
        for stop in stops:
            if stop in joined:
                keep = joined.index(stop)
                texts[-1] = texts[-1][: max(0, keep - len(joined) + len(texts[-1]))]
                return Generation(tokens, texts, "stop", stop)
    return Generation(tokens, texts, "length")


class RefusedError(Exception):
    """The engine's own refusal."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, engine: MockEngine) -> None:
        self.engine = engine
        self.task: asyncio.Task[None] | None = None
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.engine.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.connections.discard(self)
        if self.task is not None and not self.task.done():
            self.engine.aborted += 1
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.headers, self.body = b"", {}, b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.task = asyncio.ensure_future(self._serve())

    def answer(self, status: int, value: Any) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    async def _serve(self) -> None:
        engine, path = self.engine, self.url.decode().partition("?")[0]
        body = json.loads(self.body) if self.body else {}
        engine.seen.append(Seen(self.url.decode(), self.headers, body))
        if path == "/health":
            self.answer(200 if engine.healthy else 503, b"")
        elif path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": MODEL, "max_model_len": CONTEXT}]})
        elif path == "/reset_prefix_cache":
            self.answer(engine.reset_status, b"")
        elif path == "/server_info":
            self.answer(200, {"vllm_config": engine.name})
        elif path == "/tokenize":
            engine.tokenize_calls += 1
            self.answer(200, {"tokens": prompts_of(body)[0]})
        elif path in ("/v1/completions", "/v1/chat/completions"):
            await self._complete(body, chat="chat" in path)
        else:
            self.answer(404, {"error": {"message": "no such path", "code": 404}})

    async def _complete(self, body: dict[str, Any], chat: bool) -> None:
        engine = self.engine
        behaviour = engine.script.popleft() if engine.script else engine.default
        engine.running += 1
        try:
            await asyncio.sleep(behaviour.delay_s)
            if behaviour.hang:
                await asyncio.Event().wait()
            if behaviour.die_silently:
                self.transport.abort()
                return
            if behaviour.raw is not None:
                self.transport.write(behaviour.raw)
                self.transport.close()
                return
            if behaviour.status != 200:
                raise RefusedError(behaviour.status, behaviour.refusal)
            await self._generate(body, chat, behaviour)
        except RefusedError as error:
            refusal = {"message": str(error), "type": "Scripted", "param": None, "code": error.status}
            self.answer(error.status, {"error": refusal})
        except asyncio.CancelledError:
            # As vLLM's connector does for a request that is aborted before it was scheduled.
            engine.held_elsewhere(body.get("kv_transfer_params") or {})
            raise
        finally:
            engine.running -= 1

    async def _generate(self, body: dict[str, Any], chat: bool, behaviour: Behaviour) -> None:
        prompts = prompts_of(body)
        limit = limit_of(body, chat, max(map(len, prompts)))
        params = body.get("kv_transfer_params") or {}
        n = body.get("n") or 1
        answers: list[Generation] = []
        for prompt in prompts:
            self.engine.take_kv(params, prompt)
            for index in range(n):
                seed = body.get("seed")
                answers.append(generate(prompt, body, limit, None if seed is None else seed + index))
        kv_params = await self._hand_over(params, prompts, answers, behaviour)
        form = _Form(self.headers.get("x-request-id", "none"), body, chat, prompts, answers, n)
        if not body.get("stream"):
            value = form.whole(self.engine.returns_token_ids)
            value["kv_transfer_params"] = kv_params
            self.answer(200, value)
            return
        head = "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
        self.transport.write(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode())
        for count, event in enumerate(form.events()):
            if behaviour.die_after_events == count:
                if behaviour.die_within_event:
                    self.transport.write(f"{len(event):x}\r\n".encode() + event[: len(event) // 2])
                    await asyncio.sleep(0.01)
                self.transport.close()
                return
            if behaviour.error_event_after == count:
                event = b'data: {"error": {"message": "engine is dead", "code": 500}}\n\n'
            for piece in behaviour.reframe(event) if behaviour.reframe else [event]:
                self.transport.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                if behaviour.reframe:
                    await asyncio.sleep(0)
            await asyncio.sleep(behaviour.token_delay_s)
        self.transport.write(b"0\r\n\r\n")

    async def _hand_over(
        self,
        params: dict[str, Any],
        prompts: list[list[int]],
        answers: list[Generation],
        behaviour: Behaviour,
    ) -> dict[str, Any] | None:
        engine = self.engine
        if params.get("do_remote_decode"):
            if answers[0].finish_reason != "length":
                return None  # vLLM hands KV over only for a prefill that ended by its length
            name = f"{engine.name}-{len(engine.seen)}-{time.monotonic_ns()}"
            engine.held[name] = prompts[0]
            return {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": engine.name,
                "remote_block_ids": list(range(len(prompts[0]))),
                "remote_request_id": name,
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
            }
        if "disagg_spec" in params:
            await engine.send_kv(params["disagg_spec"], prompts[0], behaviour)
            if params["ret_first_tok"] and engine.returns_first_tok:
                return {"first_tok": answers[0].tokens[0]}
        return None


def prompts_of(body: dict[str, Any]) -> list[list[int]]:
    """Token ids of each prompt."""
    if "messages" in body:
        text = " ".join(f"<{m['role']}> {m['content']}" for m in body["messages"])
        return [tokenize(text + " <assistant>")]
    prompt = body.get("prompt")
    if not prompt:
        raise RefusedError(400, "a prompt is needed")
    if isinstance(prompt, str):
        return [tokenize(prompt)]
    if isinstance(prompt[0], int):
        return [prompt]
    return [tokenize(one) if isinstance(one, str) else one for one in prompt]


def limit_of(body: dict[str, Any], chat: bool, prompt_length: int) -> int:
    """How many tokens to generate at most."""
    limit = body.get("max_tokens")
    if limit is None and not chat:
        limit = 16
    if chat and body.get("max_completion_tokens") is not None:
        limit = body["max_completion_tokens"]
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise RefusedError(400, f"max_tokens must be at least 1, got {limit}.")
    room = CONTEXT - prompt_length
    if limit is not None and limit > room:
        raise RefusedError(400, f"{prompt_length} + {limit} tokens do not fit into {CONTEXT}")
    return room if limit is None else limit


def streamed(usage: dict[str, Any]) -> dict[str, Any]:
    """vLLM leaves empty fields out of the usage in streams."""
    return {key: value for key, value in usage.items() if value is not None}


class _Form:
    """An answer in OpenAI's shape."""

    def __init__(
        self,
        request_id: str,
        body: dict[str, Any],
        chat: bool,
        prompts: list[list[int]],
        answers: list[Generation],
        n: int,
    ) -> None:
        self.body, self.chat, self.prompts, self.answers, self.n = body, chat, prompts, answers, n
        self.frame = {
            "id": ("chatcmpl-" if chat else "cmpl-") + request_id,
            "created": int(time.time()),
            "model": body.get("model", MODEL),
        }

    def usage(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": None,
        }

    def total(self) -> dict[str, Any]:
        return self.usage(sum(map(len, self.prompts)), sum(len(a.tokens) for a in self.answers))

    def logprobs(self, texts: list[str]) -> Any:
        if not self.body.get("logprobs"):
            return None
        return {"tokens": texts, "token_logprobs": [-0.5] * len(texts)}

    def whole(self, token_ids: bool) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.answers):
            prompt, text = self.prompts[index // self.n], "".join(answer.texts)
            ids = answer.tokens if token_ids and self.body.get("return_token_ids") else None
            choice: dict[str, Any] = {"index": index, "logprobs": self.logprobs(answer.texts)}
            choice |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
            choice["token_ids"] = ids
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
            else:
                echo = "".join(map(word, prompt)) if self.body.get("echo") else ""
                choice |= {"text": echo + text, "prompt_logprobs": None}
                choice["prompt_token_ids"] = prompt if ids is not None else None
            choices.append(choice)
        value = self.frame | {"object": "chat.completion" if self.chat else "text_completion"}
        value |= {"choices": choices, "usage": self.total()}
        if self.chat:
            given = token_ids and self.body.get("return_token_ids")
            value["prompt_token_ids"] = self.prompts[0] if given else None
        return value

    def events(self) -> Iterator[bytes]:
        options = self.body.get("stream_options") or {}
        frame = self.frame | {"object": "chat.completion.chunk" if self.chat else "text_completion"}

        def event(value: dict[str, Any]) -> bytes:
            return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"

        def counted(index: int, tokens: int) -> dict[str, Any]:
            if options.get("include_usage") and options.get("continuous_usage_stats"):
                return {"usage": streamed(self.usage(len(self.prompts[index // self.n]), tokens))}
            return {}

        if self.chat:
            for index in range(len(self.answers)):
                delta = {"role": "assistant", "content": ""}
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield event(frame | {"choices": [choice]} | counted(index, 0))
        for position in range(max(len(answer.tokens) for answer in self.answers)):
            for index, answer in enumerate(self.answers):
                if position >= len(answer.tokens):
                    continue
                last = position + 1 == len(answer.tokens)
                text = answer.texts[position]
                if position == 0 and self.body.get("echo"):
                    text = "".join(map(word, self.prompts[index // self.n])) + text
                choice = {"index": index, "logprobs": self.logprobs([text])}
                choice["finish_reason"] = answer.finish_reason if last else None
                if self.chat:
                    choice["delta"] = {"content": text}
                    if last:
                        choice["stop_reason"] = answer.stop_reason
                else:
                    choice |= {"text": text, "stop_reason": answer.stop_reason if last else None}
                yield event(frame | {"choices": [choice]} | counted(index, position + 1))
        if options.get("include_usage"):
            yield event(frame | {"choices": [], "usage": streamed(self.total())})
        yield b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def engines(*wanted: MockEngine) -> Any:
    """Start engines, and stop them at the end."""
    try:
        yield [await engine.start() for engine in wanted]
    finally:
        for engine in wanted:
            await engine.stop()
