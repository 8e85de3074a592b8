# SPDX-License-Identifier: Apache-2.0
"""Answers that are sewn together: a first token from the prefiller, or several parts in one answer.

All of it works on the engines' own JSON, so that what an engine adds to its answers stays in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from splitbench.proxy.bodies import JsonObject
from splitbench.proxy.wire import EngineError, RefusalError, event

# Fields that the proxy asked for, or that belong to the hand-over; the client's direct answer has null here.
PRIVATE_FIELDS = ("prompt_token_ids", "token_ids", "kv_transfer_params")


@dataclass(slots=True)
class Head:
    """The first token, as the prefill engine gave it. `prompt_ids` is None where the reply has none."""

    reply: JsonObject
    text: str
    token_id: int
    prompt_ids: list[int] | None
    finish_reason: str
    stop_reason: Any

    @property
    def ends(self) -> bool:
        """The token ends the answer (end of sequence or a stop token)."""
        return self.finish_reason != "length"


def read_head(body: bytes, fields: JsonObject, chat: bool) -> Head:
    """Take the first token out of a prefill engine's reply.

    Raises:
        EngineError: the reply has no first token.
        RefusalError: the engine parses chat answers, so that its text is not what the token says.
    """
    try:
        reply = orjson.loads(body)
        choice = reply["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        token_id = (reply.get("kv_transfer_params") or {}).get("first_tok")
        if token_id is None:
            token_id = choice["token_ids"][0]
        prompt_ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        finish_reason = choice["finish_reason"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError):
        raise EngineError(
            502, "the prefill engine's reply has no first token (neither first_tok nor token_ids)"
        ) from None
    if not isinstance(text, str):
        raise RefusalError(
            400,
            "this model's chat answers are parsed by the engine: run the proxy with --first-token decoder",
        )
    prompt = fields.get("prompt")
    if prompt_ids is None and isinstance(prompt, list):
        prompt_ids = prompt if prompt and isinstance(prompt[0], int) else prompt[0]
        if isinstance(prompt_ids, str):
            prompt_ids = None
    return Head(reply, text, token_id, prompt_ids, finish_reason, choice.get("stop_reason"))


@contextmanager
def understood() -> Iterator[None]:
    """Around work on engines' JSON: what is not of OpenAI's form is the engine's failure.

    Raises:
        EngineError
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(502, f"an engine's answer is not of OpenAI's form ({error!r})") from None


def with_head(usage: JsonObject) -> JsonObject:
    """The decoder's usage, told as the client sees it: its prompt held the first token of the answer."""
    return usage | {
        "prompt_tokens": usage["prompt_tokens"] - 1,
        "completion_tokens": (usage.get("completion_tokens") or 0) + 1,
    }


def streamed_usage(usage: JsonObject) -> JsonObject:
    """Usage as streams have it: without the empty fields of a whole answer."""
    return {key: value for key, value in usage.items() if value is not None}


def sew(head: Head, index: int, rest: JsonObject | None, chat: bool) -> JsonObject:
    """A whole answer: the prefill engine's reply, continued by the decoder's completion (None: nothing)."""
    answer = {key: None if key in PRIVATE_FIELDS else value for key, value in head.reply.items()}
    first: JsonObject = head.reply["choices"][0]
    choice: JsonObject = {key: None if key in PRIVATE_FIELDS else value for key, value in first.items()}
    choice["index"] = index
    if rest is not None:
        more = rest["choices"][0]
        if chat:
            choice["message"] = choice["message"] | {"content": head.text + more["text"]}
        else:
            choice["text"] = head.text + more["text"]
        choice["finish_reason"] = more["finish_reason"]
        choice["stop_reason"] = more.get("stop_reason")
        usage: JsonObject = head.reply["usage"]
        answer["usage"] = usage | with_head(rest["usage"])
    answer["choices"] = [choice]
    return answer


def merge(answers: list[JsonObject], prompts: list[bool]) -> JsonObject:
    """One answer out of the parts' answers; `prompts` tells which of them counts its prompt."""
    merged = dict(answers[0])
    merged["choices"] = [answer["choices"][0] | {"index": i} for i, answer in enumerate(answers)]
    merged["usage"] = add_usage([answer["usage"] for answer in answers], prompts)
    if "kv_transfer_params" in merged:
        merged["kv_transfer_params"] = None
    return merged


def add_usage(usages: list[JsonObject], prompts: list[bool]) -> JsonObject:
    """Usage of a request of several answers: a prompt counts once, however many answers it has."""
    prompt_tokens = sum(usage["prompt_tokens"] for usage, once in zip(usages, prompts, strict=True) if once)
    completion_tokens = sum(usage.get("completion_tokens") or 0 for usage in usages)
    return usages[0] | {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def head_events(head: Head, index: int, chat: bool, last: bool, options: JsonObject) -> bytes:
    """The stream's first events: the role (chat), and the first token."""
    reply = head.reply
    common: JsonObject = {key: reply[key] for key in ("id", "created", "model") if key in reply}
    common["object"] = "chat.completion.chunk" if chat else "text_completion"
    usage: JsonObject = {}
    if options.get("include_usage") and options.get("continuous_usage_stats"):
        usage = {"usage": streamed_usage(reply["usage"])}
    finish = head.finish_reason if last else None
    choice: JsonObject = {"index": index, "logprobs": None, "finish_reason": finish}
    out = b""
    if chat:
        role = choice | {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        role_usage = {}
        if usage:
            prompt_tokens = reply["usage"]["prompt_tokens"]
            counts = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens, "completion_tokens": 0}
            role_usage = {"usage": streamed_usage(reply["usage"]) | counts}
        out = event(common | {"choices": [role]} | role_usage)
        choice["delta"] = {"content": head.text}
        if last:
            choice["stop_reason"] = head.stop_reason
    else:
        choice["text"] = head.text
        choice["stop_reason"] = head.stop_reason if last else None
    return out + event(common | {"choices": [choice]} | usage)


class StreamRewriter:
    """Turn one decoder's events into those of the client's answer.

    `usage` holds the part's final usage once it has come. With `keep_end`, the final usage and `[DONE]` stay
    in the stream (the part is the whole answer).
    """

    def __init__(self, index: int, head: Head | None, chat: bool, keep_end: bool) -> None:
        self.index = index
        self.head = head
        self.chat = chat
        self.keep_end = keep_end
        self.usage: JsonObject | None = None
        self.frame: JsonObject = {}
        self.ended_with_head = False
        # Whether events without usage may pass as they are, but for `patch`. Known after the first event.
        self.quick = False
        self._may_be_quick = keep_end and not (chat and head is not None)
        self._patch: tuple[bytes, bytes] | None = None

    def end_with_head(self) -> None:
        """The first token is the whole answer: its usage is the prefill's."""
        assert self.head is not None
        reply = self.head.reply
        self.ended_with_head = True
        self.usage = streamed_usage(reply["usage"])
        self.frame = {key: reply[key] for key in ("id", "created", "model") if key in reply}
        self.frame["object"] = "chat.completion.chunk" if self.chat else "text_completion"

    def __call__(self, data: bytes) -> bytes:
        if not data.startswith(b"data:"):
            return data
        if self.quick and b'"prompt_tokens"' not in data:
            return self.patch(data)
        text = data[5:].strip()
        if text == b"[DONE]":
            return data if self.keep_end else b""
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise EngineError(502, "the decode engine sent an event that is not JSON") from None
        if not isinstance(value, dict) or "choices" not in value:
            return data  # an engine's error event
        if self._may_be_quick and not self.quick:
            self._learn(data, value)
        with understood():
            return self._rewrite(value)

    def _learn(self, data: bytes, value: JsonObject) -> None:
        """What in this stream's events differs from the first token's event: the time, if anything.

        Quotes within JSON strings are escaped, so that the key cannot be part of a text.
        """
        ours = self.head.reply.get("created") if self.head is not None else None
        theirs = value.get("created")
        if isinstance(ours, int) and isinstance(theirs, int) and ours != theirs:
            old = re.search(rb'"created":\s*%d' % theirs, data)
            # The same length, or the chunk would not be as long as it says.
            if old is None or len(str(ours)) != len(str(theirs)):
                return
            self._patch = old[0], old[0].replace(b"%d" % theirs, b"%d" % ours)
        self.quick = True

    def patch(self, data: bytes) -> bytes:
        """An event, or a chunk of events, that needs no rewriting."""
        return data if self._patch is None else data.replace(*self._patch)

    def _rewrite(self, value: JsonObject) -> bytes:
        usage = value.get("usage")
        if usage is not None and self.head is not None:
            usage = value["usage"] = with_head(usage)
        if self.head is not None:
            for key in ("id", "created"):
                if key in self.head.reply:
                    value[key] = self.head.reply[key]
        chat_again = self.chat and self.head is not None
        if chat_again:
            value["object"] = "chat.completion.chunk"
        if not value["choices"]:
            self.usage = usage
            self.frame = value
            return event(value) if self.keep_end else b""
        for choice in value["choices"]:
            choice["index"] = self.index
            if chat_again:
                choice["delta"] = {"content": choice.pop("text", "")}
                if choice.get("finish_reason") is None:
                    choice.pop("stop_reason", None)
        if usage is None and chat_again:
            value.pop("usage", None)
        return event(value)
