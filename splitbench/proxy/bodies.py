# SPDX-License-Identifier: Apache-2.0
"""Request bodies: what is read of a client's, and what the prefill and decode engines get instead of it."""

from __future__ import annotations

from typing import Any

import orjson

from splitbench.proxy.wire import RefusalError

JsonObject = dict[str, Any]

# Left out of a prefill. It makes one token and moves the KV of the prompt; these either contradict that (a
# token minimum above 1), end it in a way that makes the engine keep its KV (stops), or make it compute what
# nobody reads.
NOT_FOR_PREFILL = frozenset(
    [
        *(
            "stream_options",
            "min_tokens",
            "stop",
            "stop_token_ids",
            "include_stop_str_in_output",
            "n",
            "best_of",
        ),
        *("echo", "logprobs", "top_logprobs", "prompt_logprobs", "response_format", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "return_token_ids"),
    ]
)


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
    if fields.get("use_beam_search"):
        raise RefusalError(400, "beam search is not served over a prefill-decode layout", "use_beam_search")
    if fields.get("prompt_embeds") is not None:
        raise RefusalError(400, "prompt_embeds are not served over a prefill-decode layout", "prompt_embeds")
    if fields.get("prompt_logprobs") is not None:
        raise RefusalError(
            400, "prompt_logprobs need the prompt computed where it is decoded, not moved", "prompt_logprobs"
        )
    if fields.get("echo") and fields.get("logprobs") is not None:
        raise RefusalError(
            400, "echo with logprobs needs the prompt computed where it is decoded, not moved", "echo"
        )


def prefill_body(fields: JsonObject, kv_transfer_params: JsonObject | None) -> bytes:
    """The request for the prefill engine: the same prompt, one token, not streamed."""
    body = {key: value for key, value in fields.items() if key not in NOT_FOR_PREFILL}
    body["max_tokens"] = 1
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    body["stream"] = False
    # An end-of-sequence as the first token must not end the prefill as "stopped": vLLM then frees the KV at
    # once.
    body["ignore_eos"] = True
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    return orjson.dumps(body)


def with_kv_params(body: bytes, kv_transfer_params: bytes) -> bytes:
    """The client's own bytes with the KV parameters added as the last key: nothing else changes."""
    end = body.rstrip()
    comma = b"" if end[:-1].rstrip().endswith(b"{") else b","
    return b'%b%b"kv_transfer_params":%b}' % (end[:-1], comma, kv_transfer_params)


NIXL_PREFILL_PARAMS: JsonObject = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
