# SPDX-License-Identifier: Apache-2.0
"""What the smoke test says of answers, and how one failed test is kept for a session's later cells."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitbench.errors import UserError
from splitbench.experiment.models import Thresholds
from splitbench.measuring import around
from splitbench.measuring.around import SessionNotes, Watching
from splitbench.measuring.evidence import Check
from splitbench.measuring.scrape import Answer
from splitbench.measuring.smoke import TOKEN_IDS, agreement, judge_answers, prompts

ALONE = ["abcdefgh", "ijklmnop", "qrstuvwx"]
OTHER = ["zbcdefgh", "zjklmnop", "zrstuvwx"]


def answers(texts: list[str], tops: int | None = None) -> list[Answer]:
    """Answers whose 20 likeliest first tokens have `tops` in common with those of an engine alone."""
    names = None if tops is None else frozenset(f"token_id:{n}" for n in range(20 - tops, 40 - tops))
    return [Answer(text, names) for text in texts]


def judged(
    together: list[str],
    again: list[str] = ALONE,
    changed: list[str] = OTHER,
    tops: tuple[int | None, int | None] = (None, None),
) -> Check:
    """tops: of the layout and of the changed prompts."""
    alone = answers(ALONE, None if tops == (None, None) else 20)
    return judge_answers(
        alone, answers(again), answers(changed, tops[1]), answers(together, tops[0]), Thresholds()
    )


def test_agreement_counts_from_the_start() -> None:
    assert agreement(["abcd"], ["abcd"]) == 100
    assert agreement(["abcd"], ["abxd"]) == 50
    assert agreement(["abcd", "abcd"], ["xbcd", "abcd"]) == 50
    assert agreement(["abcd"], [""]) == 0


@pytest.mark.parametrize(
    ("together", "verdict"),
    [
        (ALONE, "ok"),
        (["abcdefgX", *ALONE[1:]], "ok"),  # rounding: one late token
        (["abXXXXXX", *ALONE[1:]], "warn"),
        (OTHER, "invalid"),
    ],
)
def test_answers_of_the_layout_are_the_engines_own(together: list[str], verdict: str) -> None:
    assert judged(together).verdict == verdict


def test_an_engine_that_differs_from_itself_is_the_measure() -> None:
    shaky = ["aXXXXXXX", "iXXXXXXX", "qXXXXXXX"]
    assert judged(["aYYYYYYY", "iYYYYYYY", "qYYYYYYY"], again=shaky).verdict == "ok"


@pytest.mark.parametrize(
    ("tops", "verdict"),
    [
        ((13, 3), "warn"),  # as rounding leaves them
        ((3, 3), "invalid"),  # as far off as with another prompt
        ((0, 3), "invalid"),
        ((13, 12), "invalid"),  # tops that don't depend on the prompt acquit nobody
        ((None, 3), "invalid"),
    ],
)
def test_likeliest_tokens_tell_rounding_from_lost_kv(tops: tuple[int | None, int], verdict: str) -> None:
    found = judged(OTHER, tops=tops)
    assert found.verdict == verdict
    assert ("rounding" in found.reason) == (verdict == "warn")
    assert judged(ALONE, tops=tops).verdict == "ok"


def test_likeliest_tokens_condemn_where_texts_alone_would_warn() -> None:
    assert judged(["abXXXXXX", *ALONE[1:]], tops=(2, 3)).verdict == "invalid"


def test_a_model_that_does_not_look_at_its_prompt_proves_nothing() -> None:
    found = judged(ALONE, changed=[ALONE[0], *OTHER[1:]])
    assert found.verdict == "warn"
    assert "does not depend on the prompt's first token" in found.reason


def test_prompts_are_fixed_and_differ() -> None:
    asked = prompts(50)
    assert asked == prompts(50)
    assert len({tuple(prompt) for prompt in asked}) == len(asked)
    assert all(token in TOKEN_IDS for prompt in asked for token in prompt)


def test_a_failed_smoke_test_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def smoke(*_: Any) -> dict[str, Check]:
        asked.append(1)
        return {"kv-moved": Check("kv-moved", "invalid", "decoders loaded only 0.0 % of the prompt tokens")}

    monkeypatch.setattr(around, "smoke", smoke)
    log = tmp_path / "decode-0.log"
    log.write_text("started\n")
    session: Any = SimpleNamespace(folder=tmp_path, engines=[SimpleNamespace(name="decode-0", log=log)])
    cell: Any = SimpleNamespace(layout="pd")
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(UserError, match=r"failed its smoke test.*kv-moved: decoders loaded only 0.0 %"):
            SessionNotes(session).smoke(cell, session, Watching(), said.append)
        log.write_text("started\nand went on\n")
    assert len(asked) == 1
    assert said == ["smoke test of pd: kv-moved invalid: decoders loaded only 0.0 % of the prompt tokens"]
    assert json.loads((tmp_path / "measuring.json").read_text())["ready_bytes"] == {"decode-0": 8}
