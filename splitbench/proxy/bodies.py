# SPDX-License-Identifier: Apache-2.0
"""Request bodies: what is read of a client's, and what the prefill and decode engines get instead of it."""

from __future__ import annotations

from typing import Any, cast

import orjson

from splitbench.proxy.wire import RefusalError

JsonObject = dict[str, Any]

MAX_PARTS = 1024
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, and vLLM's, where a completion names no max_tokens, or null


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Left out of a prefill. It makes one token and moves the KV of the prompt; these either contradict that (a
# token minimum above 1), end it in a way that makes the engine keep its KV (stops), or make it compute what
# nobody reads.
NOT_FOR_PREFILL = _names("""
    stream_options min_tokens stop stop_token_ids include_stop_str_in_output n best_of echo logprobs
    top_logprobs prompt_logprobs response_format structured_outputs guided_json guided_regex guided_choice
    guided_grammar return_token_ids
""")

# With the first token from the prefiller, the answer is sewn together from two engines. These parameters come
# out right then; each of the others would be wrong in some case, and is refused where it asks for anything.
SEWABLE = _names("""
    model prompt messages max_tokens max_completion_tokens stream stream_options n temperature top_p top_k
    min_p repetition_penalty seed ignore_eos min_tokens stop_token_ids logit_bias allowed_token_ids
    skip_special_tokens spaces_between_special_tokens priority cache_salt user request_id add_special_tokens
    truncate_prompt_tokens chat_template chat_template_kwargs add_generation_prompt continue_final_message
    documents reasoning_effort
""")
# Which of these are about the prompt, which the decoder gets as token ids, or are set anew for it.
NOT_FOR_SEWN_DECODE = _names("""
    prompt messages max_tokens max_completion_tokens stream stream_options n min_tokens add_special_tokens
    truncate_prompt_tokens chat_template chat_template_kwargs add_generation_prompt continue_final_message
    documents reasoning_effort
""")


def read_body(body: bytes) -> JsonObject:
    """The client's JSON object.

    Raises:
        RefusalError: not a JSON object, or one that carries KV parameters of its own.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RefusalError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RefusalError(400, "the body must be a JSON object")
    if value.get("kv_transfer_params") is not None:
        raise RefusalError(400, "kv_transfer_params are set by the proxy", "kv_transfer_params")
    return value


def refuse_for_pd(fields: JsonObject) -> None:
    """Refuse what no hand-over of KV answers right.

    Raises:
        RefusalError: with the parameter's name.
    """
    for name, what in (("use_beam_search", "beam search"), ("prompt_embeds", "prompt embeddings")):
        if fields.get(name):
            raise RefusalError(400, f"{what}: not served over a prefill-decode layout", name)
    needs_prompt = "needs the prompt computed where it is decoded, which a prefill-decode layout does not do"
    if fields.get("prompt_logprobs") is not None:
        raise RefusalError(400, f"prompt_logprobs: {needs_prompt}", "prompt_logprobs")
    if fields.get("echo") and fields.get("logprobs") is not None:
        raise RefusalError(400, f"echo with logprobs: {needs_prompt}", "echo")


def refuse_for_sewing(fields: JsonObject) -> None:
    """Refuse what comes out wrong when the first token is made by another engine than the rest.

    Raises:
        RefusalError: with the parameter's name.
    """
    mend = "not served with the first token from the prefiller; run the proxy with --first-token decoder"
    for name, value in fields.items():
        if name in SEWABLE or value is None or value is False or value in ([], {}, ""):
            continue
        if name in ("frequency_penalty", "presence_penalty", "length_penalty", "best_of") and value in (0, 1):
            continue
        raise RefusalError(400, f"{name}: {mend}", name)
    if "messages" in fields and token_budget(fields, chat=True) is None:
        # The decoder answers a completion, whose limit is 16 where none is given; a chat's is what the context holds.
        raise RefusalError(400, f"a chat without max_tokens: {mend}", "max_tokens")
    if fields.get("seed") is not None and fields.get("temperature") != 0:
        raise RefusalError(400, f"seed without temperature 0: {mend}", "seed")
    for message in fields.get("messages") or ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(
            not isinstance(piece, dict) or piece.get("type") != "text" for piece in content
        ):
            raise RefusalError(400, f"content that is not text: {mend}", "messages")
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        value = fields.get(name)
        least = 0 if name == "min_tokens" else 1
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise RefusalError(400, f"{name} must be an integer of at least {least}", name)


def token_budget(fields: JsonObject, chat: bool) -> int | None:
    """How many tokens the client wants at most; None: as many as the context holds."""
    if chat:
        budget = fields.get("max_completion_tokens")
        budget = fields.get("max_tokens") if budget is None else budget
    else:
        budget = fields.get("max_tokens")
        budget = DEFAULT_COMPLETION_TOKENS if budget is None else budget
    return cast("int | None", budget)


def split(fields: JsonObject) -> list[JsonObject]:
    """One body per answer that the client wants: for each prompt of a list, `n` times.

    KV moves for one prompt and one answer at a time. Answer `i` of a prompt draws with seed + i, as in vLLM.

    Raises:
        RefusalError: `n` is no count, or there are more than MAX_PARTS answers.
    """
    n = fields.get("n")
    n = 1 if n is None else n
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise RefusalError(400, "n must be an integer of at least 1", "n")
    prompt = fields.get("prompt")
    prompts = [prompt]
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        prompts = prompt
    if n * len(prompts) == 1:
        return [fields]
    if n * len(prompts) > MAX_PARTS:
        raise RefusalError(400, f"more than {MAX_PARTS} answers in one request", "n")
    parts = []
    for one in prompts:
        for index in range(n):
            part = {key: value for key, value in fields.items() if key != "n"}
            if "prompt" in fields:
                part["prompt"] = one
            if isinstance(part.get("seed"), int):
                part["seed"] += index
            parts.append(part)
    return parts


def prefill_body(fields: JsonObject, kv_transfer_params: JsonObject | None) -> bytes:
    """The request for the prefill engine where the decoder makes every token: one token, which is dropped."""
    body = {key: value for key, value in fields.items() if key not in NOT_FOR_PREFILL}
    body["max_tokens"] = 1
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    body["stream"] = False
    # An end of sequence as the first token must not end the prefill as "stopped": vLLM then frees the KV.
    body["ignore_eos"] = True
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    return orjson.dumps(body)


def head_prefill_body(fields: JsonObject, kv_transfer_params: JsonObject | None) -> bytes:
    """The request for the prefill engine where its token is the answer's first: sampled as asked."""
    body = {key: value for key, value in fields.items() if key not in ("stream_options", "n")}
    body["max_tokens"] = 1
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    if body.get("min_tokens"):
        body["min_tokens"] = 1
    body["stream"] = False
    body["return_token_ids"] = True  # spares asking the tokenizer
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    return orjson.dumps(body)


def sewn_decode_body(fields: JsonObject, chat: bool, prompt_ids: list[int], head_id: int) -> bytes:
    """The decoder's request (`/v1/completions`): the prompt with its first token, and one token less."""
    body = {key: value for key, value in fields.items() if key not in NOT_FOR_SEWN_DECODE}
    body["prompt"] = [*prompt_ids, head_id]
    budget = token_budget(fields, chat)
    body["max_tokens"] = None if budget is None else budget - 1
    if fields.get("min_tokens"):
        body["min_tokens"] = fields["min_tokens"] - 1
    if fields.get("stream"):
        body["stream"] = True
        if fields.get("stream_options") is not None:
            body["stream_options"] = fields["stream_options"]
    return orjson.dumps(body)


def with_kv_params(body: bytes, kv_transfer_params: bytes | None) -> bytes:
    """The client's own bytes with the KV parameters added as the last key: nothing else changes."""
    if kv_transfer_params is None:
        return body
    end = body.rstrip()
    comma = b"" if end[:-1].rstrip().endswith(b"{") else b","
    return b'%b%b"kv_transfer_params":%b}' % (end[:-1], comma, kv_transfer_params)
