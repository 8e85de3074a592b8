# SPDX-License-Identifier: Apache-2.0
"""How a completion travels: to a replica as it came, or through a prefill and a decode engine."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

import orjson

from splitbench.proxy.bodies import (
    JsonObject,
    head_prefill_body,
    prefill_body,
    read_body,
    refuse_for_pd,
    refuse_for_sewing,
    sewn_decode_body,
    split,
    token_budget,
    with_kv_params,
)
from splitbench.proxy.call import Call, Part
from splitbench.proxy.engines import Engine, Fetch, fetch
from splitbench.proxy.events import EventRelay, refusal_text
from splitbench.proxy.handoff import Handoff
from splitbench.proxy.policy import Rotation
from splitbench.proxy.sewing import (
    Head,
    StreamRewriter,
    add_usage,
    head_events,
    merge,
    read_head,
    sew,
    understood,
)
from splitbench.proxy.wire import (
    DONE_EVENT,
    LAST_CHUNK,
    EngineError,
    RefusalError,
    chunk,
    error_object,
    event,
    relayed_head,
)

FOR_TOKENIZER = (
    *("model", "prompt", "messages", "add_special_tokens", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"transfer-encoding", b"chunked"))


class Flow(ABC):
    """What a mode does with a completion."""

    @abstractmethod
    async def serve(self, call: Call) -> None:
        """Answer the client.

        Raises:
            RefusalError: the request cannot be answered right in this mode.
            EngineError: an engine failed before the first byte.
        """

    async def start(self) -> None:  # noqa: B027 (most modes have nothing to start)
        """Open what the mode listens on."""

    async def stop(self) -> None:  # noqa: B027
        """Close it."""


class ReplicaFlow(Flow):
    """Whole replicas: the request goes on as it came."""

    def __init__(self, replicas: Rotation) -> None:
        self.replicas = replicas

    async def serve(self, call: Call) -> None:
        part = Part(call, {})
        part.decoders = self.replicas.order()
        await part.relay(call.request.body)


class EngineRefusal(Exception):  # noqa: N818 (no failure: an engine's answer on its way to the client)
    """An engine refused the request; the client gets its words."""

    def __init__(self, reply: Fetch) -> None:
        super().__init__(reply.status)
        self.reply = reply


class Guard:
    """Around the work on one part: however it ends, KV that no decoder takes is given up, once."""

    def __init__(self, handoff: Handoff, part: Part) -> None:
        self.handoff = handoff
        self.part = part

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        part = self.part
        refused = isinstance(error, EngineRefusal)
        # A decoder that has the request frees the KV itself when its connection closes; LMCache's only once
        # it has begun to read it.
        decoder_has_it = part.decode_delivered and not refused
        if self.handoff.keeps_unread and "decode_first_byte" not in part.record.stages:
            decoder_has_it = False
        decoder_died = isinstance(error, EngineError) and error.status == 502
        nothing_kept = refused and not part.prefilled
        if error is not None and not nothing_kept and (decoder_died or not decoder_has_it):
            self.handoff.abandon(part)
        self.handoff.close(part)


class Answer:
    """A streamed answer that the proxy writes itself."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._begun = False

    def begin(self) -> None:
        """Send the head, once."""
        if not self._begun:
            self.call.client.write(self._head())

    def send(self, payload: bytes) -> None:
        """Send events."""
        self.call.client.write(self._head() + chunk(payload))

    def end(self, payload: bytes) -> None:
        """Send the last events and end the answer."""
        self.call.client.write(self._head() + (chunk(payload) if payload else b"") + LAST_CHUNK)
        self.call.record.stages["last_byte"] = time.monotonic()

    def _head(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        call = self.call
        call.client.started = True
        call.record.status = 200
        call.record.stages["first_byte"] = time.monotonic()
        return relayed_head(200, STREAM_HEADERS, call.record.id, not call.request.keep_alive)

    def break_off(self, error: EngineError | RefusalError) -> None:
        """Say what failed, and leave the answer without its end (see `Relay.break_off`)."""
        self.call.record.error = str(error)
        self.call.client.write(chunk(event(error_object(error.status, str(error)))))
        self.call.client.cut()


class PrefillDecodeFlow(Flow):
    """Prefill, hand-over, decode. With `head`, the prefiller's token is the first of the answer."""

    def __init__(self, prefillers: Rotation, handoff: Handoff, head: bool) -> None:
        self.prefillers = prefillers
        self.handoff = handoff
        self.head = head

    async def start(self) -> None:
        await self.handoff.start()

    async def stop(self) -> None:
        await self.handoff.stop()

    async def serve(self, call: Call) -> None:
        fields = read_body(call.request.body)
        refuse_for_pd(fields)
        if self.head:
            refuse_for_sewing(fields)
            call.record.first_token = "prefiller"
        bodies = split(fields)
        try:
            if len(bodies) == 1 and not self.head:
                await self._through(Part(call, fields))
                return
            single = len(bodies) == 1
            parts = [Part(call, body, None if single else i) for i, body in enumerate(bodies)]
            for part in parts:
                part.record.first_token = call.record.first_token
            if fields.get("stream"):
                await self._stream(call, fields, parts)
            else:
                await self._collect(call, fields, parts)
        except EngineRefusal as refusal:
            call.pass_on(refusal.reply)

    async def _prefill(self, part: Part) -> Fetch:
        params = self.handoff.open(part)
        body = (head_prefill_body if self.head else prefill_body)(part.fields, params)
        reply = await part.prefill(self.prefillers.order(), body)
        if reply.status != 200:
            raise EngineRefusal(reply)
        part.prefilled = True
        return reply

    async def _through(self, part: Part) -> None:
        """One prompt, every token from the decoder: its answer passes as it comes."""
        async with Guard(self.handoff, part):
            reply = await self._prefill(part)
            params = await self.handoff.settle(part, reply)
            relay = await part.relay(with_kv_params(part.call.request.body, params))
            if relay.status != 200:
                self.handoff.abandon(part)

    def _decode_request(
        self, part: Part, head: Head | None, params: bytes | None
    ) -> tuple[bytes, bytes | None]:
        """Body and target of the decoder's request (None: the client's own target)."""
        if head is None:
            return with_kv_params(orjson.dumps(part.fields), params), None
        assert head.prompt_ids is not None
        return sewn_decode_body(
            part.fields, part.call.chat, head.prompt_ids, head.token_id
        ), b"/v1/completions"

    def _read_head(self, part: Part, reply: Fetch) -> tuple[Head | None, bool]:
        """The first token, and whether the answer ends with it."""
        if not self.head:
            return None, False
        chat = part.call.chat
        head = read_head(reply.body, part.fields, chat)
        return head, head.ends or token_budget(part.fields, chat) == 1

    async def _stream(self, call: Call, fields: JsonObject, parts: list[Part]) -> None:
        answer = Answer(call)
        options = fields.get("stream_options") or {}
        single = len(parts) == 1

        async def run(part: Part) -> StreamRewriter:
            async with Guard(self.handoff, part):
                reply = await self._prefill(part)
                head, last = self._read_head(part, reply)
                rewriter = StreamRewriter(part.index, head, call.chat, keep_end=single)
                if head is not None:
                    answer.send(head_events(head, part.index, call.chat, last, options))
                    part.record.stages["first_byte"] = time.monotonic()
                    if last:
                        self.handoff.abandon(part)
                        rewriter.end_with_head()
                        return rewriter
                    await _need_prompt_ids(part, reply, head)
                params = await self.handoff.settle(part, reply)
                body, target = self._decode_request(part, head, params)

                def make(engine: Engine) -> EventRelay:
                    limit_s = call.limits.stall_s
                    return EventRelay(engine, call.client, part.id, limit_s, rewriter, answer.begin)

                await part.decode(make, body, target)
                return rewriter

        try:
            rewriters = await _all([run(part) for part in parts])
        except EngineRefusal as refusal:
            if not call.client.started:
                raise
            text = refusal_text(refusal.reply.status, refusal.reply.body)
            answer.break_off(EngineError(502, f"{refusal.reply.engine.name}: {text}"))
            return
        except (EngineError, RefusalError) as error:
            if not call.client.started:
                raise
            answer.break_off(error)
            return
        tail = b""
        if not single or rewriters[0].ended_with_head:
            usages = [rewriter.usage for rewriter in rewriters if rewriter.usage is not None]
            if options.get("include_usage") and len(usages) == len(rewriters):
                usage = add_usage(usages, _first_of_prompt(fields, parts))
                tail = event(rewriters[0].frame | {"choices": [], "usage": usage})
            tail += DONE_EVENT
        answer.end(tail)

    async def _collect(self, call: Call, fields: JsonObject, parts: list[Part]) -> None:
        async def run(part: Part) -> JsonObject:
            async with Guard(self.handoff, part):
                reply = await self._prefill(part)
                head, last = self._read_head(part, reply)
                if head is not None:
                    if last:
                        self.handoff.abandon(part)
                        return sew(head, part.index, None, call.chat)
                    await _need_prompt_ids(part, reply, head)
                params = await self.handoff.settle(part, reply)
                body, target = self._decode_request(part, head, params)
                rest = await part.decode(Fetch, body, target)
                if rest.status != 200:
                    raise EngineRefusal(rest)
                value = _json_answer(rest)
                with understood():
                    return value if head is None else sew(head, part.index, value, call.chat)

        answers = await _all([run(part) for part in parts])
        value = answers[0]
        if len(parts) > 1:
            with understood():
                value = merge(answers, _first_of_prompt(fields, parts))
        call.record.status = 200
        call.record.stages.setdefault("first_byte", time.monotonic())
        call.client.answer(200, orjson.dumps(value), b"application/json", call.request, call.record.id)
        call.record.stages["last_byte"] = time.monotonic()


async def _need_prompt_ids(part: Part, reply: Fetch, head: Head) -> None:
    """Ask the tokenizer for the prompt's ids where the engine's reply does not have them."""
    if head.prompt_ids is not None:
        return
    body = orjson.dumps({name: part.fields[name] for name in FOR_TOKENIZER if name in part.fields})
    limits = part.call.limits
    request = part.call.engine_request(body, f"{part.id}-tokenize", b"/tokenize")
    tokens = await fetch(reply.engine, request, limits.connect_s, limits.prefill_s)
    ids = _json_answer(tokens).get("tokens") if tokens.status == 200 else None
    if not isinstance(ids, list):
        raise EngineError(502, f"{reply.engine.name} did not tell the prompt's token ids")
    head.prompt_ids = ids


def _json_answer(reply: Fetch) -> JsonObject:
    try:
        value = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise EngineError(502, f"{reply.engine.name} did not answer with a JSON object")
    return value


def _first_of_prompt(fields: JsonObject, parts: list[Part]) -> list[bool]:
    """Which parts are the first answer of their prompt."""
    n = fields.get("n") or 1
    return [part.index % n == 0 for part in parts]


Result = TypeVar("Result")


async def _all(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Do all parts at once; the first failure ends the others and is raised."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and (error := task.exception()) is not None:
                raise error
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
