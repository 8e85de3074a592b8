# SPDX-License-Identifier: Apache-2.0
"""The last steps of a start: the layout answers, in PD its KV has moved, and its engines have said what they are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from splitbench.files import write_json
from splitbench.serving import facts, readiness
from splitbench.serving.launch import Child

if TYPE_CHECKING:
    from splitbench.serving.session_processes import SessionProcesses


async def first_completions(session: SessionProcesses, engines: list[Child]) -> None:
    """Completions through the front door until every engine had its part; in PD, KV must have moved.

    Raises:
        SessionError: a completion failed, or a decoder computed a prompt itself.
    """
    host, port = session.front
    decoders = [child for child in engines if session.part(child)["role"] == "decode"]
    before = [await loaded_tokens(session, child) for child in decoders]
    roles = [engine["role"] for engine in session.plan["engines"]]
    tokens = readiness.TRANSFER_TOKENS if decoders else readiness.PROBE_TOKENS
    for number in range(readiness.pairs_to_probe(session.plan["kind"], roles)):
        wrong = await readiness.complete(host, port, session.plan["served_model"], number, tokens)
        session.check_alive()
        if wrong is not None:
            servers = [child for child in session.children.values() if child.kind != "client"]
            raise session.failed(servers[-1], f"is healthy but fails the first completion: {wrong}")
    for child, had in zip(decoders, before, strict=True):
        if had is not None and not await _moved(session, child, had):
            raise session.failed(
                child,
                f"computed a prompt of {tokens} tokens itself: "
                "no KV was loaded that came from a prefill engine, by its own metrics or log",
            )


async def loaded_tokens(session: SessionProcesses, child: Child) -> float | None:
    """Tokens that a decoder has got from elsewhere so far, and loaded; None where it does not say."""
    if session.plan["connector"] == "lmcache":
        return readiness.retrieved_tokens(facts.read_start_of_log(child.log))
    part = session.part(child)
    answer = await readiness.ask(part["host"], part["port"], "/metrics", limit_s=30.0)
    return readiness.transferred_tokens(answer.text) if answer.status == 200 else None


async def _moved(session: SessionProcesses, child: Child, before: float) -> bool:
    """Whether the decoder's count of loaded tokens has risen; it may lag an answer a little."""
    for _ in range(8):
        now = await loaded_tokens(session, child)
        if now is not None and now > before:
            return True
        await asyncio.sleep(0.25)
    return False


async def keep_facts(session: SessionProcesses, engines: list[Child]) -> None:
    """What every engine says about itself, into the session's folder; a fact that can't be had is null.

    Raises:
        SessionError: a process ended meanwhile.
    """
    found = await asyncio.gather(*(facts.ask_engine(session.part(child), child.log) for child in engines))
    session.check_alive()
    content = {child.name: entry for child, entry in zip(engines, found, strict=True)}
    write_json(session.folder / facts.FILE, {"format": facts.FORMAT, "engines": content})
