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
from splitbench.measuring.smoke import TOKEN_IDS, agreement, judge_answers, prompts

ALONE = ["abcdefgh", "ijklmnop", "qrstuvwx"]
OTHER = ["zbcdefgh", "zjklmnop", "zrstuvwx"]


def judged(together: list[str], again: list[str] = ALONE, changed: list[str] = OTHER) -> Check:
    return judge_answers(ALONE, again, changed, together, Thresholds())


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
