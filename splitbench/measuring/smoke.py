# SPDX-License-Identifier: Apache-2.0
"""Asked of a PD session before its first cell: does KV cache really move, and is the answer still the model's?

A decoder that is asked alone computes a prompt itself, so its own answers are the reference: same weights, same
kernels, no transfer. Whatever the layout answers to the same prompts must be that, up to what the engine differs
from itself. First it is made sure that the answer depends on the prompt's first token; with a model whose answers
do not, equal answers prove nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitbench.experiment.cells import Cell
from splitbench.experiment.models import Thresholds
from splitbench.measuring.evidence import Check, EngineEvidence, Evidence, Verdict
from splitbench.measuring.logs import EngineLog, read_part, size_of
from splitbench.measuring.scrape import Answer, answer, reset_prefix_caches, scrape
from splitbench.measuring.transfer import kv_moved
from splitbench.serving.plan import Plan
from splitbench.serving.session import Session

PROMPTS = 3
PROMPT_TOKENS = 320
ANSWER_TOKENS = 8
# Ordinary words in every vocabulary of 32,000 and more; special tokens are at the ends.
TOKEN_IDS = range(1_000, 30_000)
SETTLE_S = 3.0
"""Counters may trail the answer by an engine's step or its statistics' interval."""


def prompts(length: int, count: int = PROMPTS) -> list[list[int]]:
    """The fixed prompt set, as token ids."""
    return [random.Random(f"smoke/{n}").choices(TOKEN_IDS, k=length) for n in range(count)]


def smoke(cell: Cell, session: Session, longest: int, thresholds: Thresholds) -> dict[str, Check]:
    """Ask a session that is up.

    Args:
        cell: the first cell that is to be measured in it.
        longest: tokens of prompt and answer that the engines are known to take.
        thresholds: of the experiment.

    Returns:
        checks by name; empty for a layout that moves no KV.
    """
    decoders = [engine for engine in session.engines if engine.role == "decode"]
    if not decoders:
        return {}
    model = cell.plan.served_model
    asked = prompts(max(1, min(PROMPT_TOKENS, longest - ANSWER_TOKENS)))

    def all_answers(url: str, which: Sequence[Sequence[int]]) -> list[Answer]:
        return [answer(url, model, prompt, ANSWER_TOKENS) for prompt in which]

    alone: list[list[Answer]] = []
    changed: list[Answer] = []
    why_not = ""
    if cell.plan.connector == "lmcache-mp":
        why_not = "the engines share one cache, so none of them computes these prompts by itself"
    else:
        try:
            for _ in range(2):
                reset_prefix_caches(session)
                alone.append(all_answers(decoders[0].url, asked))
            changed = all_answers(decoders[0].url, [[prompt[0] + 1, *prompt[1:]] for prompt in asked])
        except OSError as error:
            why_not = f"{decoders[0].name} can't be asked alone: {error}"
    reset_prefix_caches(session)
    before, marks = scrape(session), {engine.name: size_of(engine.log) for engine in session.engines}
    try:
        together = all_answers(session.front_url, asked)
    except OSError as error:
        reason = f"the layout does not answer: {error}"
        return {"kv-moved": Check("kv-moved", "invalid", reason)}
    checks = {"kv-moved": _moved(cell, session, before, marks, asked, thresholds)}
    checks["same-answers"] = (
        Check("same-answers", "warn", why_not)
        if why_not
        else judge_answers(alone[0], alone[1], changed, together, thresholds)
    )
    return checks


def _moved(
    cell: Cell,
    session: Session,
    before: dict[str, dict[str, float]],
    marks: dict[str, int],
    asked: Sequence[Sequence[int]],
    thresholds: Thresholds,
) -> Check:
    until_s = time.monotonic() + SETTLE_S
    while True:
        after = scrape(session)
        evidence = Evidence(
            kind=cell.plan.kind,
            connector=cell.plan.connector,
            prompts=len(asked),
            input_tokens=len(asked[0]),
            output_tokens=ANSWER_TOKENS,
            concurrency=1,
            warmups=0,
            warmup_seed_differs=True,
            bench={"errors": [""] * len(asked), "input_lens": [len(prompt) for prompt in asked]},
            engines={e.name: EngineEvidence(e.role, before[e.name], after[e.name]) for e in session.engines},
            logs={e.name: EngineLog(e.role, "", _since(e.log, marks[e.name])) for e in session.engines},
            thresholds=thresholds,
            chunk_tokens=chunk_tokens(cell.plan),
        )
        check = kv_moved(evidence)
        assert check is not None
        if check.verdict != "invalid" or time.monotonic() > until_s:
            return check
        time.sleep(0.25)


def chunk_tokens(plan: Plan) -> int | None:
    """Tokens of a chunk where only whole chunks move (LMCache's server), else None."""
    for service in plan.services:
        if "--chunk-size" in service.argv:
            return int(service.argv[service.argv.index("--chunk-size") + 1])
    return None


def _since(log: Path, mark: int) -> str:
    return read_part(log, mark, size_of(log))


def agreement(left: Sequence[str], right: Sequence[str]) -> float:
    """How far answers agree from their start on, as a mean share of their length in percent."""
    shares = []
    for one, other in zip(left, right, strict=True):
        same = next(
            (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        shares.append(same / max(len(one), len(other), 1))
    return 100 * sum(shares) / max(1, len(shares))


def shared_tops(left: Sequence[Answer], right: Sequence[Answer]) -> float | None:
    """How many of the likeliest first tokens two have in common, as a mean share in percent; None: not known.

    A greedy answer turns on the one likeliest token, which rounding alone can change: a decoder that loads a prompt
    computes its last token by itself, with other kernels than a prefill. The twenty likeliest as a set survive that and
    do not survive KV of another prompt.
    """
    shares = [
        100 * len(one.tops & other.tops) / max(len(one.tops), len(other.tops))
        for one, other in zip(left, right, strict=True)
        if one.tops and other.tops
    ]
    return sum(shares) / len(shares) if shares and len(shares) == len(left) else None


def judge_answers(
    alone: Sequence[Answer],
    again: Sequence[Answer],
    changed: Sequence[Answer],
    together: Sequence[Answer],
    thresholds: Thresholds,
) -> Check:
    """Compare answers to the same prompts.

    Where texts differ, the likeliest first tokens decide whether that is rounding, if the layout gives them and the
    changed prompts show that they depend on every token of the prompt.

    Args:
        alone: of an engine that computed the prompts itself.
        again: the same once more.
        changed: of that engine to the prompts with another first token.
        together: of the whole layout.
        thresholds: how far they may differ.
    """
    texts = [[each.text for each in answers] for answers in (alone, again, together, changed)]
    own, layout = agreement(texts[0], texts[1]), agreement(texts[0], texts[2])
    tops, tops_changed = shared_tops(alone, together), shared_tops(alone, changed)
    figures: dict[str, Any] = {
        "prompts": len(alone),
        "own_agreement_percent": round(own, 1),
        "layout_agreement_percent": round(layout, 1),
        "equal_answers": sum(a == b for a, b in zip(texts[0], texts[2], strict=True)),
    }
    if tops is not None and tops_changed is not None:
        figures |= {
            "layout_shared_tops_percent": round(tops, 1),
            "changed_shared_tops_percent": round(tops_changed, 1),
        }
    limits = {
        "warn_percent": thresholds.same_answers_warn_percent,
        "invalid_percent": thresholds.same_answers_invalid_percent,
        "shared_tops_percent": thresholds.same_answers_shared_tops_percent,
    }
    if any(a == b for a, b in zip(texts[0], texts[3], strict=True)):
        reason = (
            "the model's answer does not depend on the prompt's first token, so equal answers prove nothing"
        )
        return Check("same-answers", "warn", reason, figures, limits)
    lost = own - layout
    text = f"answers agree to {layout:.0f} % with those of an engine that computed the prompts itself"
    if lost <= thresholds.same_answers_warn_percent:
        return Check("same-answers", "ok", text, figures, limits)
    text += f"; it agrees with itself to {own:.0f} %"
    limit = thresholds.same_answers_shared_tops_percent
    if tops is not None and tops_changed is not None and tops_changed < limit:
        text += (
            f"; of the 20 likeliest first tokens {tops:.0f} % are the same, "
            f"{tops_changed:.0f} % after a change of the prompt's first token"
        )
        if tops >= limit:
            return Check("same-answers", "warn", f"{text}: rounding", figures, limits)
        return Check("same-answers", "invalid", text, figures, limits)
    verdict: Verdict = "invalid" if lost > thresholds.same_answers_invalid_percent else "warn"
    return Check("same-answers", verdict, text, figures, limits)
