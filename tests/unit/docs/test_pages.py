# SPDX-License-Identifier: Apache-2.0
"""Pages: generated ones are current, no link is dead, every check and statistic that exists is explained."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitbench.manual import _messages, check_names, current, filled, table
from splitbench.serving.failures import KNOWN_CAUSES
from tests.unit.docs.pages import REPOSITORY, pages, prose

LINK = re.compile(r"(?:\]\(|(?:src|href)=\")([^)\"\s]+)")


def test_generated_pages_are_what_the_code_makes() -> None:
    stale = [
        path.relative_to(REPOSITORY).as_posix()
        for path, text in current(REPOSITORY).items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run: make pages"


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower(), flags=re.UNICODE)
        found.add(re.sub(r"[\s]+", "-", words.strip()))
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_no_link_within_the_repository_is_dead(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"(https?|mailto):", target):
            continue
        name, _, anchor = urllib.parse.unquote(target).partition("#")
        aim = (page.parent / name).resolve() if name else page
        assert aim.exists(), f"{page}: {target}"
        if anchor and aim.suffix == ".md":
            assert anchor in anchors(aim), f"{page}: {target}"


def test_files_that_pages_name_are_there() -> None:
    named = re.compile(
        r"`((?:splitbench|config|docs|tests|envs|scripts|rules|profiles|benchmarks)/[\w./-]+)`"
    )
    for page in pages():
        for name in named.findall(prose(page)):
            # A file that the reader is to make.
            if "mine.yaml" not in name:
                assert (REPOSITORY / name).exists(), f"{page}: {name}"


def _pages_of(entries: list[Any] | str) -> Iterator[str]:
    """Pages of a navigation: names, names with a title, or sections of such."""
    if isinstance(entries, str):
        yield entries
        return
    for entry in entries:
        for each in [entry] if isinstance(entry, str) else entry.values():
            yield from _pages_of(each)


def test_every_page_has_its_place_in_the_navigation() -> None:
    settings = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = list(_pages_of(settings["nav"]))
    assert sorted(listed) == sorted(path.name for path in (REPOSITORY / "docs").glob("*.md"))


def test_every_check_has_a_section_with_its_formula_source_and_reason() -> None:
    text = (REPOSITORY / "docs" / "method.md").read_text(encoding="utf-8")
    names = check_names()
    assert len(names) >= 6
    for name in names:
        section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section is not None, f"docs/method.md lacks a section '## {name}'"
        for word in ("nvalid", "**Source:**", "**Why:**"):
            assert word in section[1], f"docs/method.md, {name}: {word}"


def test_every_known_failure_is_found_by_its_message() -> None:
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for cause in KNOWN_CAUSES:
        for message in _messages(cause.pattern):
            assert f"`{message}`" in text
            # What a reader would see is free of the pattern's marks.
            assert not re.search(r"\\|\.\*|\[\w{2}\]|\(\?", message), message


def test_a_block_that_nothing_makes_is_an_error() -> None:
    with pytest.raises(KeyError):
        filled("<!-- made: nothing -->\n<!-- /made -->")


def test_bars_do_not_break_tables() -> None:
    assert table(("a", "b"), [("x|y", "z")]) == "| a | b |\n|---|---|\n| x\\|y | z |\n"


def test_no_page_says_a_thing_twice() -> None:
    """Two branches that describe the same check merge without a conflict."""
    for page in pages():
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert len(headings) == len(set(headings)), f"{page}: {sorted(headings)}"
        paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if len(part) > 120]
        assert len(paragraphs) == len(set(paragraphs)), page


def test_every_statistic_has_its_formula_and_source() -> None:
    text = (REPOSITORY / "docs" / "method-statistics.md").read_text(encoding="utf-8")
    section = text.partition("## Formulas\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in re.split(r" \| ", row.strip("| "))]
        for row in section.splitlines()
        if "|" in row
    ]
    assert all(len(row) == 3 and all(row) for row in rows if not row[0].startswith("-"))
    named = " ".join(row[0] for row in rows)
    for word in (
        "quantile",
        "interval",
        "difference",
        "attainment",
        "goodput",
        "cost",
        "variance",
        "steps",
        "needs",
    ):
        assert word in named, word
