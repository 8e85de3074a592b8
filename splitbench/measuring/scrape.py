# SPDX-License-Identifier: Apache-2.0
"""Small requests to a session's servers: their counters, their prefix caches, single answers."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitbench.errors import UserError
from splitbench.measuring.metrics import Metrics, parse_metrics
from splitbench.serving.session import Server, Session

LIMIT_S = 10.0
ANSWER_LIMIT_S = 120.0
TOPS = 20
"""As many as vLLM gives without being told to give more."""
_KEPT = ("vllm:", "splitbench_proxy")
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "splitbench_proxy_in_flight",
)
"""What is kept over time."""


def http(
    url: str, *, method: str = "GET", body: Mapping[str, Any] | None = None, limit_s: float = LIMIT_S
) -> bytes:
    """One request; JSON goes along where there is any.

    Raises:
        OSError: no answer, or one that is not 200.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=limit_s) as answer:
        return bytes(answer.read())


def servers(session: Session) -> list[Server]:
    """Engines, and the proxy where there is one."""
    return [*session.engines, *([session.proxy] if session.proxy is not None else [])]


def metrics_of(server: Server, names: Sequence[str] = ()) -> Metrics:
    """What a server counts.

    Args:
        names: only these; a Prometheus client renders no others then, which takes an engine's loop microseconds where
            the whole page holds up the tokens of all for several milliseconds. Who doesn't know that sends all.

    Raises:
        OSError: it does not answer.
    """
    query = urllib.parse.urlencode([("name[]", name) for name in names])
    text = http(f"{server.url}/metrics" + (f"?{query}" if query else "")).decode("utf-8", errors="replace")
    return {series: value for series, value in parse_metrics(text).items() if series.startswith(_KEPT)}


def scrape(session: Session) -> dict[str, Metrics]:
    """Counters of every server, by name; a proxy that is not ours may have none.

    Raises:
        UserError: an engine does not answer.
    """
    scraped: dict[str, Metrics] = {}
    for server in servers(session):
        try:
            scraped[server.name] = metrics_of(server)
        except OSError as error:
            if server.role == "proxy":
                continue
            raise UserError(f"{server.name} does not answer: {error}", where=str(server.log)) from None
    return scraped


def sampled(session: Session) -> dict[str, Metrics]:
    """The gauges while a cell runs, by source of the telemetry; who does not answer is left out."""
    found: dict[str, Metrics] = {}
    for server in servers(session):
        try:
            found[source_of(server)] = metrics_of(server, GAUGES)
        except OSError:
            continue
    return found


def source_of(server: Server) -> str:
    """A server's source in the telemetry table."""
    return "proxy" if server.role == "proxy" else f"engine:{server.name}"


def reset_prefix_caches(session: Session) -> None:
    """Empty the engines' prefix caches, where they have such an endpoint.

    Raises:
        UserError: an engine does not answer, or refuses.
    """
    for engine in session.engines:
        try:
            http(f"{engine.url}/reset_prefix_cache", method="POST")
        except urllib.error.HTTPError as error:
            if error.code != 404:  # an engine without this endpoint; the fresh-prompts check decides
                raise UserError(
                    f"{engine.name} answered {error.code} to a reset of its prefix cache",
                    where=str(engine.log),
                ) from None
        except OSError as error:
            raise UserError(f"{engine.name} does not answer: {error}", where=str(engine.log)) from None


@dataclass(frozen=True)
class Answer:
    """A greedy answer; `tops` are the likeliest tokens in place of its first one, None where the server won't say."""

    text: str
    tops: frozenset[str] | None = None


def answer(url: str, model: str, prompt: Sequence[int], tokens: int) -> Answer:
    """The greedy answer to a prompt of token ids.

    Raises:
        OSError: there is none.
    """
    more = {"logprobs": TOPS, "return_tokens_as_token_ids": True}
    try:
        choice = _choice(url, model, prompt, tokens, more)
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        # Sewn from two engines' tokens, an answer has no probabilities.
        choice = _choice(url, model, prompt, tokens, {})
    listed = ((choice.get("logprobs") or {}).get("top_logprobs") or [None])[0]
    return Answer(str(choice["text"]), frozenset(listed) if listed else None)


def _choice(
    url: str, model: str, prompt: Sequence[int], tokens: int, more: Mapping[str, Any]
) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": False,
    } | dict(more)
    reply = json.loads(http(f"{url}/v1/completions", method="POST", body=body, limit_s=ANSWER_LIMIT_S))
    choice: dict[str, Any] = reply["choices"][0]
    return choice
