# SPDX-License-Identifier: Apache-2.0
"""Both READMEs say the same, and what they say of the experiments is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tests.unit.docs.pages import FENCE, REPOSITORY, commands, prose

ENGLISH, JAPANESE = REPOSITORY / "README.md", REPOSITORY / "README.ja.md"
LINK = re.compile(r"(?:\]\(|src=\")([^)\"\s]+)")
# In words in one language, in digits in the other; both are compared by meaning in review.
WORDS = {"1", "2", "10", "12", "2026", "vol"}


def numbers(path: Path) -> set[str]:
    """Numbers in the text, links and code taken away."""
    text = re.sub(r"\]\([^)]*\)|<img[^>]*>", "", prose(path))
    return {each.rstrip(".,") for each in re.findall(r"\d[\d.,]*", text)} - WORDS


def headings(path: Path) -> list[int]:
    """Levels of the headings, in order."""
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(path), re.MULTILINE)]


def test_both_have_the_same_commands_links_numbers_and_headings() -> None:
    assert commands(ENGLISH) == commands(JAPANESE)
    assert len(commands(ENGLISH)) >= 8
    english, japanese = (LINK.findall(prose(path)) for path in (ENGLISH, JAPANESE))
    assert english[1:] == japanese[1:]
    assert (english[0], japanese[0]) == ("README.ja.md", "README.md")
    assert numbers(ENGLISH) == numbers(JAPANESE)
    assert headings(ENGLISH) == headings(JAPANESE)
    rows = [
        len(re.findall(r"^\|", path.read_text(encoding="utf-8"), re.MULTILINE))
        for path in (ENGLISH, JAPANESE)
    ]
    assert rows[0] == rows[1]


def blocks(path: Path, language: str) -> list[str]:
    """Code blocks of a language."""
    return [
        found["body"]
        for found in FENCE.finditer(path.read_text(encoding="utf-8"))
        if found["language"] == language
    ]


def within(part: Any, whole: Any, where: str = "") -> list[str]:
    """What a part says that the whole doesn't."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return [
            each for key, value in part.items() for each in within(value, whole.get(key), f"{where}.{key}")
        ]
    return [] if part == whole else [f"{where}: {part} is {whole} in the experiment"]


def test_the_reference_experiment_is_shown_as_it_is_in_ten_lines() -> None:
    [shown] = blocks(ENGLISH, "yaml")
    assert blocks(JAPANESE, "yaml") == [shown]
    assert len(shown.splitlines()) == 10
    experiment = yaml.safe_load(
        (REPOSITORY / "config/experiments/sakura-h100.yaml").read_text(encoding="utf-8")
    )
    assert within(yaml.safe_load(shown), experiment) == []


def test_the_limits_in_the_table_of_checks_are_the_defaults() -> None:
    from splitbench.experiment.models import Thresholds
    from splitbench.manual import check_names

    table = {
        row[0]: row[1]
        for row in re.findall(
            r"^\| ([a-z-]+) \| ([^|]*) \|", ENGLISH.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    limits = Thresholds()
    assert f"{limits.input_tokens_off_percent:g} %" in table["tokens"]
    assert f"{limits.coalesced_invalid_percent:g} %" in table["coalescing"]
    assert f"{limits.prefix_hit_percent:g} %" in table["fresh-prompts"]
    assert f"{limits.kv_moved_percent:g} %" in table["kv-moved"]
    assert set(table) - {"splitbench", "check", "tool"} <= set(check_names())
