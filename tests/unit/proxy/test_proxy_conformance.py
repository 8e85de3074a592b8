# SPDX-License-Identifier: Apache-2.0
"""OpenAI requests through every mode, compared with a direct engine's answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.mock_engine import Behaviour, next_token, tokenize, word
from tests.fakes.proxy_layout import Layout, Reply, layout, run

MODES = [
    ("round-robin", "decoder"),
    ("nixl", "decoder"),
    ("lmcache", "decoder"),
    ("lmcache", "prefiller"),
    ("lmcache-mp", "decoder"),
    ("lmcache-mp", "prefiller"),
]
PROMPT = "alpha beta gamma delta"
IDS = [7, 21, 3, 9, 40]
CHAT = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]}

SEEDED = {"seed": 5, "temperature": 0}

# (path, fields); every mode must answer each as the direct engine does.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "ignore_eos": True}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 0}),
    ("/v1/completions", {"prompt": PROMPT}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": None}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 200}),
    ("/v1/completions", {"prompt": IDS, "max_tokens": 12, "ignore_eos": True}),
    ("/v1/completions", {"prompt": [PROMPT], "max_tokens": 5, "ignore_eos": True}),
    ("/v1/completions", {"prompt": [IDS], "max_tokens": 5, "ignore_eos": True}),
    ("/v1/completions", {"prompt": [PROMPT, "epsilon zeta"], "max_tokens": 6, "ignore_eos": True}),
    ("/v1/completions", {"prompt": [IDS, IDS[::-1], [1, 2]], "max_tokens": 3, "ignore_eos": True}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "n": 3, "ignore_eos": True} | SEEDED),
    ("/v1/completions", {"prompt": [PROMPT, "zeta"], "max_tokens": 4, "n": 2, "ignore_eos": True}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 60, "min_tokens": 20}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 60, "stop_token_ids": list(range(0, 60, 6))}),
    (
        "/v1/completions",
        {"prompt": '🙂 é ü 語 \u2028 \\ "quoted"', "max_tokens": 9, "ignore_eos": True},
    ),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "echo": False, "logprobs": None, "best_of": 1}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 1}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 9, "ignore_eos": True}),
    ("/v1/chat/completions", CHAT | {"max_completion_tokens": 7, "ignore_eos": True, "temperature": 0}),
    ("/v1/chat/completions", CHAT | {"n": 2, "max_tokens": 5, "ignore_eos": True} | SEEDED),
]
STREAMS: list[dict[str, Any]] = [
    {"stream": False},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]
# Right where the decoder makes every token; refused where the answer is sewn together.
WHOLE_DECODER_ONLY: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "stop": [word(17)[1:], "never"]}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "logprobs": 1, "ignore_eos": True}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "echo": True, "ignore_eos": True}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "seed": 3, "ignore_eos": True}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "presence_penalty": 0.5, "ignore_eos": True}),
    ("/v1/chat/completions", CHAT | {"max_tokens": None}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 4, "stop": "x9"}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 4, "tools": [{"type": "function"}]}),
]


def shape(reply: Reply) -> Any:
    """An answer without what differs from run to run (id, time); a stream ordered by answer index."""
    assert not reply.broken
    if not reply.headers["content-type"].startswith("text/event-stream"):
        value = reply.value
        assert value.pop("id").startswith(("cmpl-", "chatcmpl-"))
        value.pop("created")
        return value
    events = reply.events
    assert events[-1] == "[DONE]" and "[DONE]" not in events[:-1]
    by_index: dict[int, list[Any]] = {}
    rest = []
    identities = set()
    for event in events[:-1]:
        identities.add((event.pop("id"), event.pop("created")))
        if event["choices"]:
            by_index.setdefault(event["choices"][0]["index"], []).append(event)
        else:
            rest.append(event)
    if len(by_index) == 1:
        assert len(identities) == 1
    return by_index, rest


@pytest.mark.parametrize(("mode", "first_token"), MODES)
@pytest.mark.parametrize(
    "stream", STREAMS, ids=lambda s: "-".join(s.get("stream_options", {})) or str(s["stream"])
)
def test_answers_are_those_of_a_direct_engine(mode: str, first_token: str, stream: dict[str, Any]) -> None:
    async def test() -> None:
        async with layout(mode, first_token=first_token, prefills=2, decodes=2, ranks=2) as up:
            for path, fields in REQUESTS:
                got, want = await up.both(fields | stream, path)
                assert got.status == want.status == 200, (fields, got.raw)
                assert shape(got) == shape(want), fields
            await nothing_kept(up, mode)
            if mode in ("nixl", "lmcache"):
                assert sum(engine.missing_kv for engine in up.decoders) == 0
                assert sum(engine.moved_tokens for engine in up.decoders) > 0
            if mode == "nixl":
                assert sum(engine.computed_tokens for engine in up.decoders) == 0

    run(test())


async def nothing_kept(up: Layout, mode: str) -> None:
    """No KV is left behind on either side, and nobody works or waits."""
    await up.until(lambda: not any(engine.held for engine in up.prefillers))
    await up.until(lambda: not any(engine.buffer for engine in up.decoders))
    await up.until(lambda: not any(engine.running for engine in [*up.prefillers, *up.decoders]))
    assert up.proxy.metrics.in_flight == 0


@pytest.mark.parametrize(("mode", "first_token"), MODES)
@pytest.mark.parametrize("stream", STREAMS[:2], ids=["whole", "stream"])
def test_what_cannot_be_sewn_is_refused_by_name(mode: str, first_token: str, stream: dict[str, Any]) -> None:
    async def test() -> None:
        async with layout(mode, first_token=first_token) as up:
            for path, fields in WHOLE_DECODER_ONLY:
                got, want = await up.both(fields | stream, path)
                if first_token == "decoder":
                    assert shape(got) == shape(want), fields
                else:
                    assert got.status == 400, fields
                    assert got.value["error"]["param"] in fields
                    assert "--first-token decoder" in got.value["error"]["message"]
                    assert not up.prefillers[0].completions()
            await nothing_kept(up, mode)

    run(test())


@pytest.mark.parametrize(("mode", "first_token"), MODES[1:])
def test_what_no_hand_over_answers_right_is_refused(mode: str, first_token: str) -> None:
    async def test() -> None:
        async with layout(mode, first_token=first_token) as up:
            for wrong in (
                {"prompt_logprobs": 1},
                {"echo": True, "logprobs": 2},
                {"use_beam_search": True},
                {"prompt_embeds": "abc"},
                {"kv_transfer_params": {"do_remote_decode": True}},
                {"n": 0},
                {"n": "2"},
                {"n": 2000},
            ):
                got = await up.ask({"prompt": PROMPT} | wrong)
                assert got.status == 400, wrong
                assert got.value["error"]["param"] in wrong
                assert got.value["error"]["type"] == "BadRequestError"
            for body in (b"", b"{", b"[]", b"\xff", b'"text"'):
                assert (await up.ask(body)).status == 400
            assert not up.prefillers[0].completions()

    run(test())


@pytest.mark.parametrize(("mode", "first_token"), MODES)
def test_the_engines_refusals_reach_the_client(mode: str, first_token: str) -> None:
    async def test() -> None:
        async with layout(mode, first_token=first_token) as up:
            for stream in (False, True):
                got, want = await up.both({"prompt": "", "max_tokens": 3, "stream": stream})
                assert got.status == want.status == 400
                assert got.value == want.value
                # Beyond the context: with the first token from the prefiller only the decoder can tell,
                # and then the stream has begun.
                body = {"prompt": IDS, "max_tokens": 5000, "stream": stream}
                got, want = await up.both(body)
                assert want.status == 400
                if first_token == "prefiller" and stream:
                    assert "do not fit" in got.events[-1]["error"]["message"] and got.broken
                else:
                    assert got.status == 400 and "do not fit" in got.value["error"]["message"]
            await nothing_kept(up, mode)

    run(test())


@pytest.mark.parametrize("mode", ["nixl", "lmcache", "lmcache-mp"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_first_token_that_ends_the_answer(mode: str, stream: bool) -> None:
    """End of sequence at once: one token, `stop`, and no KV left behind."""
    prompt = next([a, b] for a in range(60) for b in range(60) if next_token([a, b], None) == 0)

    async def test() -> None:
        for first_token in ("decoder", "prefiller") if mode != "nixl" else ("decoder",):
            async with layout(mode, first_token=first_token) as up:
                body = {"prompt": prompt, "max_tokens": 8, "stream": stream}
                got, want = await up.both(
                    body | ({"stream_options": {"include_usage": True}} if stream else {})
                )
                assert shape(got) == shape(want)
                await nothing_kept(up, mode)
                if mode == "nixl":
                    assert up.decoders[0].moved_tokens == 2

    run(test())


def test_ids_are_the_clients_with_an_addition_that_never_repeats() -> None:
    async def test() -> None:
        async with layout("nixl") as first, layout("nixl") as second:
            seen = set()
            for up in (first, second, first):
                for headers in ({"x-request-id": "mine"}, {}, {"x-request-id": "not good"}):
                    got = await up.ask({"prompt": PROMPT, "max_tokens": 2}, headers=headers)
                    assert got.value["id"] == "cmpl-" + got.headers["x-request-id"]
                    assert got.headers["x-request-id"].startswith("mine-") == (
                        headers == {"x-request-id": "mine"}
                    )
                    assert " " not in got.headers["x-request-id"]
                    seen.add(got.value["id"])
            assert len(seen) == 9

    run(test())


def test_the_decoder_gets_the_clients_own_bytes() -> None:
    """Key order, number forms and spacing survive: nothing of the request is written anew for it."""

    async def test() -> None:
        async with layout("nixl") as up:
            body = b'{ "max_tokens":3 , "prompt":"a\\u0062c", "t":1.0e-1, "x":12345678901234567890123 }\n'
            assert (await up.ask(body)).status == 200
            seen = up.decoders[0].completions()[0].body
            assert list(seen) == ["max_tokens", "prompt", "t", "x", "kv_transfer_params"]
            assert seen["x"] == 12345678901234567890123
            assert seen["kv_transfer_params"]["do_remote_prefill"] is True
            prefill = up.prefillers[0].completions()[0].body
            assert prefill["max_tokens"] == 1 and prefill["stream"] is False
            assert prefill["prompt"] == "abc"

    run(test())


@pytest.mark.parametrize("chat", [False, True])
def test_the_tokenizer_is_asked_only_where_the_reply_lacks_the_ids(chat: bool) -> None:
    async def test() -> None:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = (CHAT if chat else {"prompt": PROMPT}) | {"max_tokens": 6, "ignore_eos": True}
        async with layout("lmcache", first_token="prefiller") as up:
            got, want = await up.both(body, path)
            assert shape(got) == shape(want)
            assert up.prefillers[0].tokenize_calls == 0
            up.prefillers[0].returns_token_ids = False  # an engine from before return_token_ids
            got, want = await up.both(body, path)
            assert shape(got) == shape(want)
            assert up.prefillers[0].tokenize_calls == 1
            up.prefillers[0].returns_first_tok = False
            got = await up.ask(body, path)
            assert got.status == 502 and "no first token" in got.value["error"]["message"]
            await nothing_kept(up, "lmcache")

    run(test())


def test_requests_run_beside_each_other() -> None:
    async def test() -> None:
        for mode, first_token in MODES:
            async with layout(mode, first_token=first_token, prefills=2, decodes=2) as up:
                for engine in [*up.prefillers, *up.decoders, up.direct]:
                    engine.default = Behaviour(token_delay_s=0.001)
                common = {"max_tokens": 20, "ignore_eos": True}
                bodies = [common | {"prompt": f"p {i} {i * i}", "stream": bool(i % 2)} for i in range(40)]
                got = await asyncio.gather(*[up.ask(body) for body in bodies])
                want = await asyncio.gather(*[up.ask(body, port=up.direct.port) for body in bodies])
                assert [shape(g) for g in got] == [shape(w) for w in want]
                assert {len(e.completions()) for e in up.decoders} == {20}

    run(test())


def test_the_mock_tokenizer_round_trips() -> None:
    tokens = list(range(60))
    assert tokenize("".join(map(word, tokens))) == tokens
