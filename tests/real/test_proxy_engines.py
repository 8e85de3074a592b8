# SPDX-License-Identifier: Apache-2.0
"""OpenAI requests through the proxy and real engines, compared with the decoder's answers when asked directly.

One prefill and one decode engine serve all of it: over NIXL, and over LMCache's server where its environment is given.
A second proxy asks the same engines without a hand-over, to sew the first token of one to the rest of the other (each
computes the prompt then, which changes no answer).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from splitbench.environment.stage import ensure_model, ensure_serving
from splitbench.measuring.stage import places
from splitbench.serving.session import Owner, Session, SessionRequest, acquire, node_lock, stop
from splitbench.workflow import REPOSITORY, Workflow
from tests.fakes.layouts import free_ports
from tests.fakes.proxy_layout import Reply, ask

pytestmark = pytest.mark.real

TEXT = " ".join(f"w{number * 37 % 9001}" for number in range(200))
IDS = [number * 41 % 20011 for number in range(1, 150)]
GREEDY = {"model": "tiny-llama", "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "system", "content": "w5 w6"}, {"role": "user", "content": TEXT}]}
WANTED = os.environ.get("SPLITBENCH_TEST_LMCACHE", "")
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
# Close to what the model takes, so that an answer without a limit is short.
LONG = " ".join(f"w{number * 53 % 9001}" for number in range(960))

EVERYWHERE: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": TEXT, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": TEXT, "max_tokens": 2, "stream": True}),
    (COMPLETIONS, {"prompt": IDS, "max_tokens": 12}),
    (COMPLETIONS, {"prompt": IDS[:5]}),
    (COMPLETIONS, {"prompt": [TEXT, "w1 w2 w3"], "max_tokens": 6}),
    (COMPLETIONS, {"prompt": [IDS, IDS[::-1]], "max_tokens": 5, "min_tokens": 5}),
    (COMPLETIONS, {"prompt": [IDS[:9]], "max_tokens": None}),
    (CHATS, CHAT | {"max_tokens": 1}),
    (CHATS, CHAT | {"max_completion_tokens": 8}),
]
FROM_THE_DECODER: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": IDS, "max_tokens": 6, "logprobs": 2}),
    (COMPLETIONS, {"prompt": "w8 w9 w10", "max_tokens": 6, "echo": True}),
    (COMPLETIONS, {"prompt": IDS, "max_tokens": 5, "n": 2, "temperature": 1.0, "seed": 11}),
    (COMPLETIONS, {"prompt": TEXT, "max_tokens": 9, "seed": 4, "temperature": 0.9, "presence_penalty": 0.4}),
    (CHATS, CHAT | {"max_tokens": 5, "logprobs": True, "top_logprobs": 2}),
    (CHATS, {"messages": [{"role": "user", "content": LONG}]}),
]
NEVER_SEWN = ("stop", "logprobs", "echo", "seed", "presence_penalty")
STREAMS: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


@pytest.fixture(
    scope="module",
    params=[
        "nixl",
        pytest.param(
            "lmcache-mp",
            marks=pytest.mark.skipif(
                not WANTED, reason="SPLITBENCH_TEST_LMCACHE says with which environment, see test_lmcache_mp"
            ),
        ),
    ],
)
def connector(request: pytest.FixtureRequest) -> str:
    """How KV moves between the engines; also the proxy's mode."""
    return str(request.param)


@pytest.fixture(scope="module")
def session(connector: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A prefill-decode layout of the demo's engines, up."""
    file = {"nixl": "config.yaml", "lmcache-mp": "experiments/cpu-lmcache-mp.yaml"}[connector]
    config = yaml.safe_load((REPOSITORY / "config" / file).read_text(encoding="utf-8"))
    if connector == "lmcache-mp" and WANTED != "build":
        config["stack"] = {"name": "given", "python": WANTED, "packages": {"vllm": "0.32.0+cpu"}}
    flow = Workflow(config | {"node": {"base_port": free_ports(12)[0]}})
    ensure_serving(flow, print)
    ensure_model(flow, print)
    layout = next(name for name, plan in flow.cells.plans.items() if plan.kind == "pd")
    folder = tmp_path_factory.mktemp("sessions")
    state = tmp_path_factory.mktemp("state")
    request = SessionRequest(flow.cells.plans[layout], 0, places(flow), folder, Owner.current())
    with node_lock(state, "the proxy's tests", print):
        try:
            with acquire(request, print, state=state) as up:
                yield up
        finally:
            stop(state)


@contextmanager
def proxy(session: Session, *arguments: str, decoders: Sequence[str] = ()) -> Iterator[str]:
    """A proxy of our own before the session's engines; `decoders` are ports instead of the decode engine's."""
    ports = {engine.role: engine.url.rsplit(":", 1)[1] for engine in session.engines}
    command = [sys.executable, "-m", "splitbench.proxy", *arguments, "--port", "0"]
    command += ["--prefiller-port", ports["prefill"], "--num-decoders", str(max(1, len(decoders)))]
    command += ["--decoder-port", ",".join(decoders or [ports["decode"]])]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield "http://127.0.0.1:" + process.stderr.readline().rsplit(":", 1)[1].strip()
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def sewing_proxy(session: Session) -> Iterator[str]:
    """A proxy that takes the first token from the prefill engine."""
    with proxy(session, "--mode", "lmcache-mp", "--first-token", "prefiller") as url:
        yield url


def decoder(session: Session) -> str:
    return next(engine.url for engine in session.engines if engine.role == "decode")


def metric(url: str, name: str, labels: str = "") -> float:
    """Sum of a metric over the samples whose labels hold this text."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    matches = [re.fullmatch(r"(\S+?)(\{.*\})? (\S+)", line) for line in lines]
    return sum(float(m[3]) for m in matches if m and m[1] == name and labels in (m[2] or ""))


# What names a run rather than an answer. The proxy hides the token ids that it asked for; a direct engine leaves some
# empty fields out of its events.
IDENTITY = ("id", "created", "system_fingerprint", "kv_transfer_params")


def plain(value: Any) -> Any:
    """Without identity and empty fields, logprobs rounded to what survives another batch."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in IDENTITY and v is not None and v != []}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


def shape(reply: Reply) -> Any:
    """An answer in comparable form; a stream as its text, ends and usage per answer, however events were cut."""
    assert reply.status == 200 and not reply.broken, reply.raw
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return plain(reply.value)
    events = reply.events
    assert events[-1] == "[DONE]"
    answers: dict[int, dict[str, Any]] = {}
    final = None
    for event in events[:-1]:
        if not event["choices"]:
            final = plain(event["usage"])
        for choice in event["choices"]:
            answer = answers.setdefault(
                choice["index"], {"text": "", "role": None, "finish": [], "logprobs": []}
            )
            delta = choice.get("delta")
            answer["text"] += choice["text"] if delta is None else delta.get("content") or ""
            answer["role"] = answer["role"] or (delta or {}).get("role")
            answer["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            answer["logprobs"] += [plain(choice["logprobs"])] if choice.get("logprobs") else []
            answer["usage"] = plain(event.get("usage"))
    return answers, final


def compare(front: str, direct: str, requests: list[tuple[str, dict[str, Any]]]) -> int:
    """Ask both; give the number of prompt tokens whose KV had to move for the front's answers."""

    async def test() -> int:
        prompt_tokens = 0
        async with aiohttp.ClientSession() as client:
            for path, fields in requests:
                for stream in STREAMS:
                    body = GREEDY | fields | stream
                    got = await ask(client, front + path, body)
                    want = await ask(client, direct + path, body)
                    assert shape(got) == shape(want), body
                    last = got.events[-2] if body.get("stream") else got.value
                    prompt_tokens += ((last.get("usage") or {}).get("prompt_tokens") or 0) * fields.get(
                        "n", 1
                    )
        return prompt_tokens

    return asyncio.run(test())


def test_answers_on_moved_kv_are_the_engines_own(session: Session, connector: str) -> None:
    direct = decoder(session)
    labels = 'source="external_kv_transfer"'
    moved = metric(direct, "vllm:prompt_tokens_by_source_total", labels)
    asked = compare(session.front_url, direct, EVERYWHERE + FROM_THE_DECODER)
    moved = metric(direct, "vllm:prompt_tokens_by_source_total", labels) - moved
    # LMCache's server moves whole chunks only, and keeps what it was given before.
    assert moved >= (asked if connector == "nixl" else 1)
    assert asked > 0
    assert metric(session.front_url, "splitbench_proxy_kv_not_moved_total") == 0


def test_answers_sewn_from_two_engines_are_one_engines_own(session: Session, sewing_proxy: str) -> None:
    compare(sewing_proxy, decoder(session), EVERYWHERE)


def test_an_answer_ends_at_a_stop_word(session: Session) -> None:
    async def words() -> list[str]:
        async with aiohttp.ClientSession() as client:
            whole = await ask(
                client, decoder(session) + COMPLETIONS, GREEDY | {"prompt": IDS, "max_tokens": 8}
            )
            return str(whole.value["choices"][0]["text"]).split()

    fourth = asyncio.run(words())[3]
    stops = ({"stop": fourth}, {"stop": ["never", fourth], "include_stop_str_in_output": True})
    compare(
        session.front_url,
        decoder(session),
        [(COMPLETIONS, {"prompt": IDS, "max_tokens": 8} | stop) for stop in stops],
    )


def test_what_cannot_be_sewn_is_refused_by_name(session: Session, sewing_proxy: str) -> None:
    async def test() -> None:
        async with aiohttp.ClientSession() as client:
            for path, fields in [*FROM_THE_DECODER, (COMPLETIONS, {"prompt": IDS, "stop": "w1"})]:
                if not any(name in fields for name in NEVER_SEWN):
                    continue
                got = await ask(client, sewing_proxy + path, GREEDY | fields)
                assert got.status == 400, (fields, got.raw)
                assert got.value["error"]["param"] in fields
                assert "--first-token decoder" in got.value["error"]["message"]

    asyncio.run(test())


def test_a_dead_decoder_is_an_error_at_once_and_another_one_takes_over(
    session: Session, connector: str
) -> None:
    dead, alive = str(free_ports(1)[0]), decoder(session).rsplit(":", 1)[1]
    body = GREEDY | {"prompt": IDS, "max_tokens": 4}

    async def replies(front: str, count: int) -> list[Reply]:
        async with aiohttp.ClientSession() as client:
            return [await ask(client, front + COMPLETIONS, body) for _ in range(count)]

    # Nothing listens there, as after a crash.
    with proxy(session, "--mode", connector, decoders=(dead,)) as front:
        began = time.monotonic()
        (lost,) = asyncio.run(replies(front, 1))
        assert (lost.status, time.monotonic() - began < 5) == (502, True), lost.raw
        assert dead in lost.value["error"]["message"]
    (want,) = asyncio.run(replies(decoder(session), 1))
    with proxy(session, "--mode", connector, decoders=(dead, alive)) as front:
        assert [shape(reply) for reply in asyncio.run(replies(front, 4))] == [shape(want)] * 4


def test_a_decoder_that_hangs_is_given_up_in_time_and_serves_again(session: Session, connector: str) -> None:
    (hung,) = [engine for engine in session.engines if engine.role == "decode"]
    body = GREEDY | {"prompt": IDS, "max_tokens": 4}

    async def test(front: str) -> None:
        async with aiohttp.ClientSession() as client:
            want = await ask(client, decoder(session) + COMPLETIONS, body)
            os.kill(hung.pid, signal.SIGSTOP)
            began = time.monotonic()
            try:
                late = await ask(client, front + COMPLETIONS, body)
            finally:
                os.kill(hung.pid, signal.SIGCONT)
            assert (late.status, time.monotonic() - began < 5) == (504, True), late.raw
            assert shape(await ask(client, front + COMPLETIONS, body)) == shape(want)
            assert await all_freed(session)

    with proxy(session, "--mode", connector, "--answer-timeout-s", "1") as front:
        asyncio.run(test(front))


def test_refusals_are_the_engines_own(session: Session, sewing_proxy: str) -> None:
    async def test() -> None:
        async with aiohttp.ClientSession() as client:
            for body in (
                {"model": "nobody", "prompt": TEXT},
                GREEDY | {"prompt": TEXT, "temperature": -1},
                GREEDY | {"prompt": list(range(5000))},
                GREEDY | {"prompt": TEXT, "max_tokens": 0},
            ):
                direct = await ask(client, decoder(session) + COMPLETIONS, body)
                for front in (session.front_url, sewing_proxy):
                    got = await ask(client, front + COMPLETIONS, body)
                    assert got.status == direct.status >= 400, (body, got.raw, direct.raw)
                    assert got.value["error"]["message"]

    asyncio.run(test())


def test_an_abandoned_request_frees_both_engines(session: Session) -> None:
    async def test() -> None:
        for after in (0, 1):
            async with aiohttp.ClientSession() as client:
                body = GREEDY | {"prompt": TEXT, "max_tokens": 600, "stream": True}
                request = client.post(session.front_url + COMPLETIONS, data=json.dumps(body))
                if after:
                    async with request as answer:
                        await answer.content.readany()
                else:
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(request, 0.05)
        assert await all_freed(session)

    asyncio.run(test())


async def all_freed(session: Session) -> bool:
    """Wait until no engine works on a request or holds KV."""
    names = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc")
    async with asyncio.timeout(60):
        while any(metric(engine.url, name) for engine in session.engines for name in names):
            await asyncio.sleep(0.2)
    return True


def test_the_front_is_ready_with_its_engines(session: Session, tmp_path: Path) -> None:
    for path in ("/health", "/v1/models"):
        with urllib.request.urlopen(session.front_url + path, timeout=60) as answer:
            assert answer.status == 200
    reset = urllib.request.Request(f"{session.front_url}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(reset, timeout=60) as answer:
        assert set(json.loads(answer.read())["engines"].values()) == {"ok"}
