# SPDX-License-Identifier: Apache-2.0
"""Text that others wrote (configs, log lines, engines' facts) stands in the page as text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from figures_data import tables
from report_data import judged
from test_report import Page, pd_plan

from splitbench.figures.gallery import FigureSpec, Measured, draw, lineage, write_figure
from splitbench.report import Report, render
from splitbench.wording import Language

ATTACK = "</style></p>\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}&lt;${x}"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Report:
    found = tables(loads=(8,), invalid=(("pd-tp4", 8),))
    found["checks"]["reason"] = ATTACK
    measured = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    drawn = draw(measured, FigureSpec.model_validate({"figure": "itl_of_layouts", "workload": "long"}))
    stem = tmp_path_factory.mktemp("report") / "itl_of_layouts-long"
    write_figure(drawn, stem, lineage(drawn, measured, experiment=ATTACK, more=ATTACK))
    fields = judged(measured)
    for claim in fields["claims"]:
        claim["claim"] = claim["says"] = claim["says_ja"] = ATTACK
    fields["verdicts"][0]["asymmetries"] = [{"layouts": ["a", "b"], "reason": ATTACK}]
    plan = pd_plan()
    engine = plan.engines[0].model_copy(update={"argv": (ATTACK,), "env": {"X": ATTACK}})
    return Report(
        ATTACK,
        measured,
        figures=[stem],
        question=ATTACK,
        stack={ATTACK: ATTACK},
        machine={"cpu": ATTACK},
        plans=[plan.model_copy(update={"engines": (engine,)})],
        facts={"pd-tp2": {"dtype": {"prefill0": ATTACK}}},
        rerun=[(ATTACK, ATTACK)],
        rerun_figure="x {figure}" + ATTACK.replace("{", "").replace("}", ""),
        code_version=ATTACK,
        **fields,
    )


@pytest.mark.parametrize("language", ["en", "ja"])
def test_nothing_of_it_becomes_markup(attacked: Report, language: Language) -> None:
    html = render(replace(attacked, language=language))
    page = Page(html)
    assert "script" not in page.tags
    assert page.tags.count("img") == 1
    assert "49" not in page.text.split("alert")[0]
    assert page.text.count("alert(1)") > 8
    svg = attacked.figures[0].with_name(f"{attacked.figures[0].name}.svg").read_text(encoding="utf-8")
    assert "<script" not in svg
