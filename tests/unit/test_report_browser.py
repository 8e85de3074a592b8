# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: nothing logged, nothing fetched, every figure visible, no sideways scrolling."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figures_data import tables
from PIL import Image
from report_data import judged

from splitbench.figures.gallery import FigureSpec, Measured, draw, lineage, write_figure
from splitbench.report import Report, write_report
from tests.browser import find_chromium, look

# `make test` installs Chromium where it may. A run that must prove the page (CI) does not pass without it.
if find_chromium() is None:
    if os.environ.get("CI"):
        pytest.fail("no Chromium on PATH: run 'make browser', or set SPLITBENCH_CHROMIUM", pytrace=False)
    pytest.skip("no Chromium on PATH: run 'make browser' to test the page", allow_module_level=True)

ASK = (
    # Shown pictures: decoded, and with a size on the page.
    "[...document.images].filter(i => i.naturalWidth > 0 && i.getBoundingClientRect().width > 100).length",
    "document.documentElement.scrollWidth - document.documentElement.clientWidth",
    "getComputedStyle(document.body).backgroundColor",
    "document.querySelector('main section').id",
    "document.documentElement.lang",
    "[...document.querySelectorAll('details')].forEach(d => d.open = true)"
    " || document.documentElement.scrollWidth - document.documentElement.clientWidth",
)


@pytest.fixture(scope="module", params=["en", "ja"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("page")
    found = tables(loads=(1, 8), invalid=(("pd-tp4", 8),))
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    stems = []
    for figure in ("itl_by_concurrency", "itl_of_layouts"):
        drawn = draw(m, FigureSpec.model_validate({"figure": figure, "workload": "long"}))
        stems.append(folder / f"{figure}-long")
        write_figure(drawn, stems[-1], lineage(drawn, m, experiment="trial"))
    facts: dict[str, Any] = judged(m)
    report = Report(
        "trial", m, figures=stems, language=request.param, rerun_figure="snakemake {figure}", **facts
    )
    write_report(report, folder / "report.html")
    return folder / "report.html", request.param


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_in_chromium(page: tuple[Path, str], width: int, dark: bool) -> None:
    path, language = page
    seen = look(path, width=width, dark=dark, ask=ASK)
    assert seen.problems == []
    assert seen.requests == []
    shown, sideways, colour, first, lang, sideways_open = seen.answers
    assert shown == 2
    assert sideways <= 0 and sideways_open <= 0
    assert first == "verdict"
    assert lang == language
    red, green, blue = (int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    assert (red + green + blue < 200) is dark
    picture = np.asarray(Image.open(io.BytesIO(seen.picture)).convert("L"))
    assert picture.shape[1] == width
    # Something is printed on it: not one plain colour.
    assert picture.std() > 5


def test_the_browser_notices_what_a_page_may_not_do(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><title>x</title><link rel=icon href='data:,'><img src='http://127.0.0.1:9/x.png'>"
        "<script>console.error('boo'); missing()</script>"
    )
    seen = look(bad)
    assert seen.requests == ["http://127.0.0.1:9/x.png"]
    assert any("boo" in problem for problem in seen.problems)
    assert len(seen.problems) >= 3  # the call, the exception, the picture that does not load
