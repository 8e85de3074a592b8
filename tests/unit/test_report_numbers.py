# SPDX-License-Identifier: Apache-2.0
"""Every number on the page has an id, which says what the number is about."""

from __future__ import annotations

import re
from collections import Counter
from html import unescape

import pytest
from figures_data import tables
from report_data import judged

from splitbench.figures.gallery import Measured
from splitbench.report import Report, render
from splitbench.report.numbers import Numbers, number_id, numbers_of, texts_of
from splitbench.report.words import Words
from splitbench.wording import Language

# Not results: headings, and sentences that explain what a word means.
HEADINGS = {"th", "h1", "h2", "title", "summary"}
EXPLAINED = ("terms", "cells_note", "cells_mixed", "slo_note", "claims_note", "figure_files", "digests_note")


def rendered(language: Language) -> str:
    found = tables(loads=(1, 8), invalid=(("pd-tp4", 8),))
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    return render(
        Report(
            "trial",
            m,
            question="Does it pay off with 8 GPUs?",
            language=language,
            stack={"vLLM": "0.32.0"},
            machine={"memory": "8 GiB"},
            rerun=[("all", "snakemake --cores 2")],
            digests={"stack": "0" * 64},
            highest_loads=[("pd-tp2, long", "c=8", "pd-tp2", "long")],
            code_version="0.1.0",
            **judged(m),
        )
    )


@pytest.fixture(scope="module")
def pages() -> dict[Language, str]:
    return {"en": rendered("en"), "ja": rendered("ja")}


@pytest.mark.parametrize("language", ["en", "ja"])
def test_no_number_is_without_an_id(pages: dict[Language, str], language: Language) -> None:
    words = Words(language)
    explained = " ".join(words(key) for key in EXPLAINED)
    bare = [
        text
        for text, tags, number in texts_of(pages[language])
        if re.search(r"\d", text) and number is None and not HEADINGS & set(tags) and tags[-1] != "style"
        # A wrapped sentence comes in pieces.
        if not all(piece in explained for piece in text.split(". "))
    ]
    assert bare == []
    assert sum(number is not None for _, _, number in texts_of(pages[language])) > 200


def test_ids_are_stable_and_tell_numbers_apart(pages: dict[Language, str]) -> None:
    english, japanese = (numbers_of(page) for page in pages.values())
    assert {name: stated.of for name, stated in english.items()} == {
        name: stated.of for name, stated in japanese.items()
    }
    assert all(number_id(stated.of) == name for name, stated in english.items())
    kinds = Counter(stated.of[0] for stated in english.values())
    assert set(kinds) == {
        *("config", "counts", "verdict", "claim", "effect", "slo"),
        *("cell", "check", "stack", "machine", "digest", "command"),
    }
    cells = {stated.of[1] for stated in english.values() if stated.of[0] == "cell"}
    # The row, its requests, and three percentiles of each of three latencies.
    assert len(cells) == 4 * 2 and kinds["cell"] == len(cells) * (1 + 1 + 3 * 3)


def test_an_element_has_one_id_and_a_page_each_id_once(pages: dict[Language, str]) -> None:
    for page in pages.values():
        ids = re.findall(r' id="([^"]+)"', page)
        assert not [name for name, times in Counter(ids).items() if times > 1]
        for tag in re.findall(r"<[a-z][^>]*data-number[^>]*>", page):
            names = re.findall(r' ([a-z-]+)="', tag)
            assert len(names) == len(set(names)), tag


def test_what_it_is_about_survives_quoting() -> None:
    number = Numbers()
    of = ["claim", 'a "b" <c> & {d}', 1]
    page = f"<p{number(of)}>12 <b>ms</b></p><p{number(of)}>13</p>"
    assert page.count(' id="') == 1 and "<c>" not in page.replace("<b>", "")
    (stated,) = numbers_of(page).values()
    assert stated.of == tuple(of) and stated.text == "12 ms" and unescape(page).count("13") == 1
