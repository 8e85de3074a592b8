# SPDX-License-Identifier: Apache-2.0
"""Captions that the code makes have a Japanese form; what has no pattern stays as it is."""

from __future__ import annotations

import re
from typing import Any

import pytest
from figures_data import tables

from splitbench.figures.gallery import FIGURE_NAMES, FigureSpec, Measured, draw
from splitbench.report import japanese

ENGLISH = re.compile(r"[a-z]{2,} [a-z]{2,}")


def test_a_caption_is_translated_sentence_by_sentence() -> None:
    text = (
        "Cumulative distribution of ITL, workload long, at concurrency 8; colour is the budget, line style the "
        "kind. A sentence that nobody knows. n = 4 to 8 successful requests per line (1,000 to 2,000 ITLs), from "
        "2 cells each. Up to 0.26 % of a line lies below 2.12 ms."
    )
    found = japanese.caption(text)
    assert found.startswith("同時実行数 8 での ITL の累積分布、ワークロード long。")
    assert "A sentence that nobody knows. n は" in found
    assert "4～8 リクエスト (ITL 1,000～2,000 個)、セル数は線ごとに 2。最大で線の 0.26 %" in found


@pytest.fixture(scope="module")
def measured() -> Measured:
    found = tables(loads=(8,), repeats=2, invalid=(("pd-tp2", 8),))
    return Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])


@pytest.mark.parametrize("figure", FIGURE_NAMES)
def test_no_english_is_left_in_a_figures_caption(figure: str, measured: Measured) -> None:
    more: dict[str, Any] = {"limits": {"itl_ms": 30}} if figure in ("goodput", "cost") else {}
    spec = FigureSpec.model_validate({"figure": figure, "workload": "long", **more})
    caption = japanese.caption(draw(measured, spec).caption)
    assert ENGLISH.search(caption) is None, caption
