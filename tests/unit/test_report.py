# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from string import Formatter

import numpy as np
import pytest
from figures_data import tables
from report_data import judged

from splitbench.errors import UserError
from splitbench.figures.gallery import FIGURE_NAMES, FigureSpec, Measured, draw, lineage, write_figure
from splitbench.report import Report, effects, render, write_report
from splitbench.report.content import cell_rows, ms, number
from splitbench.report.words import FIGURES, WORDS
from splitbench.serving.plan import Budget, EnginePlan, Plan, ProxyPlan
from splitbench.statistics.clusters import clustered
from splitbench.wording import (
    CLAIM_REASONS,
    METRICS,
    NEXT,
    OUTCOMES,
    REASONS,
    Language,
    advise,
    explain,
)


def measured(**more: object) -> Measured:
    found = tables(**more)  # type: ignore[arg-type]
    return Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])


class Page(HTMLParser):
    """Text, tags and addresses of a page; also checks that tags are closed in order."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_effects_are_computed_per_workload_and_budget() -> None:
    m = measured()
    found = {effect.budget: effect for effect in effects(m)}
    assert list(found) == ["4 GPUs", "8 GPUs"]
    effect = found["4 GPUs"]
    assert (effect.low, effect.high) == (1, 32)
    for growth, name in zip(effect.growths, ("agg-tp4", "pd-tp2"), strict=True):
        ends = []
        for load in (1, 32):
            values, _ = m.values(f"{name}-0a0a0a0a/long-0b0b0b0b/c{load}/0-0", "itl_ms")
            ends.append(float(np.quantile(values, 0.99)))
        assert growth.layout.name == name
        assert growth.low is not None and growth.high is not None
        assert [growth.low.value_ms, growth.high.value_ms] == ends
        assert growth.factor == ends[1] / ends[0]
    aggregated, pd = effect.growths
    assert aggregated.factor is not None and pd.factor is not None
    assert aggregated.factor > 10 > pd.factor


def test_effects_say_how_little_holds_them_up() -> None:
    support = effects(measured())[0].support
    assert "P99 needs 368 requests; the smallest sample here has 12" in support
    assert "95 % intervals over requests of one server start" in support
    assert "a verdict asks for at least 3 repeats, there is 1" in support
    repeated = effects(measured(repeats=3))[0]
    assert "95 % intervals over 3 server starts" in repeated.support
    assert "verdict" not in repeated.support


def test_an_invalid_end_moves_the_comparison_and_is_named() -> None:
    effect = effects(measured(invalid=(("pd-tp2", 32),)))[0]
    assert (effect.low, effect.high) == (1, 8)
    assert "Left out: pd-tp2: no valid cell at c=32 (completion)." in effect.support


def test_without_two_shared_loads_there_is_no_number() -> None:
    effect = effects(measured(invalid=(("pd-tp2", 32), ("pd-tp2", 8))))[0]
    assert (effect.low, effect.high) == (1, 32)
    assert effect.growths[0].factor is not None
    assert effect.growths[1].factor is None
    assert effect.growths[1].why_not == "no valid cell at c=32 (completion)"


def test_one_load_gives_no_effect() -> None:
    assert effects(measured(loads=(8,))) == []
    assert "no growth with load to state" in Page(render(Report("one", measured(loads=(8,))))).text


def test_numbers_obey_the_sample_gate() -> None:
    values = np.sort(np.random.default_rng(1).exponential(10, 400))
    whole = number(clustered(values, np.arange(400), "request"), 99)
    assert whole.supported
    assert whole.value_ms == np.quantile(values, 0.99)
    assert whole.interval.low < whole.value_ms < whole.interval.high
    assert whole.note == whole.brackets.strip() == f"[{ms(whole.interval.low)}–{ms(whole.interval.high)}]"
    few = number(clustered(values[::7], np.arange(58), "request"), 99)
    assert (few.note, few.brackets) == ("n=58, needs 368", "")
    # Ten calm requests give a narrow interval by luck; it is not shown.
    calm = number(clustered(np.tile(values, 10), np.repeat(np.arange(10), 400), "request", 10), 99)
    assert np.isfinite([calm.interval.low, calm.interval.high]).all()
    assert calm.brackets == ""
    assert few.text == f"≥ {ms(few.interval.low)}"
    # A thousand tokens of one request are one sample.
    tokens = number(clustered(values, np.zeros(400, int), "request", 1), 99)
    assert tokens.note == "n=1, needs 368"
    none = number(clustered(values[:0], np.arange(0), "request", 0), 99)
    assert (none.text, none.note) == ("none", "n=0")


@pytest.mark.parametrize(
    ("value", "text"), [(4.906, "4.91"), (25.34, "25.3"), (412.4, "412"), (1204.0, "1,204"), (np.nan, "none")]
)
def test_ms(value: float, text: str) -> None:
    assert ms(value) == text


def pd_plan() -> Plan:
    engine = EnginePlan(
        name="prefill0",
        role="prefill",
        devices=(0, 1),
        port=7100,
        argv=("{serving_python}", "--kv-transfer-config", '{"kv_role": "kv_producer"}'),
        env={"PYTHONHASHSEED": "0"},
    )
    return Plan(
        layout="pd-tp2",
        kind="pd",
        connector="lmcache",
        first_token="prefiller",
        budget=Budget(kind="gpus", count=4),
        served_model="m",
        engines=(engine,),
        proxy=ProxyPlan(port=9100, argv=("{workflow_python}", "-m", "splitbench.proxy")),
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Measured]:
    folder = tmp_path_factory.mktemp("report")
    m = measured(invalid=(("pd-tp4", 8),))
    stems = []
    for figure in ("itl_of_layouts",):
        drawn = draw(m, FigureSpec.model_validate({"figure": figure, "workload": "long"}))
        stems.append(folder / figure)
        write_figure(drawn, stems[-1], lineage(drawn, m, experiment="trial"))
    report = Report(
        "trial <b>&",
        m,
        figures=stems,
        stack={"vLLM": "0.32.0"},
        machine={"CPU": "two cores"},
        plans=[pd_plan()],
        rerun=[("Everything", "snakemake --cores 2")],
        code_version="0.1.0",
        digests={"config": "c" * 64},
    )
    write_report(report, folder / "index.html")
    return (folder / "index.html").read_text(encoding="utf-8"), m


def test_nothing_is_fetched_and_nothing_runs(page: tuple[str, Measured]) -> None:
    found = Page(page[0])
    assert found.addresses
    assert all(address.startswith("data:") for address in found.addresses)
    assert "script" not in found.tags
    assert "default-src 'none'" in page[0]
    assert not re.search(r"url\(|@import", page[0])


def test_the_page_says_all_that_it_must(page: tuple[str, Measured]) -> None:
    text = Page(page[0]).text
    assert "trial <b>&" in text  # escaped in the source, plain to the reader
    assert "1 of 12 cells is invalid" in text
    assert "From c=1 to c=32 within 4 GPUs, the P99 ITL of agg-tp4 (aggregated) grew from" in text
    assert "✗ invalid completion (invalid): 48 of 96 requests failed" in text
    assert "n=96 needs 368" in text
    assert "pd-tp2 (PD, 4 GPUs)" in text and "first token from the prefiller" in text
    assert '--kv-transfer-config \'{"kv_role": "kv_producer"}\'' in text
    assert "vLLM 0.32.0" in text and "CPU two cores" in text and "snakemake --cores 2" in text
    assert "the time to second token is" in text
    assert page[0].count("<figure ") == 1
    assert page[0].count('<tr class="invalid"') == 1


def test_same_input_same_page(page: tuple[str, Measured]) -> None:
    report = Report("x", page[1])
    assert render(report) == render(report)


def test_a_missing_figure_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.json: the figure's file is missing"):
        render(Report("x", measured(loads=(1, 8)), figures=[tmp_path / "nothing"]))


def test_cells_that_nobody_checked_are_called_out() -> None:
    found = tables(loads=(1, 8))
    found["cells"]["verdict"] = None
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"])
    text = Page(render(Report("x", m))).text
    assert "8 of 8 cells were never checked" in text
    assert "unchecked" in text


def test_open_loop_cells_show_their_rate() -> None:
    found = tables(loads=(8,))
    found["cells"]["concurrency"] = np.nan
    found["cells"]["request_rate"] = 4.0
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    assert "agg-tp4 4 req/s" in Page(render(Report("open", m))).text


@pytest.mark.parametrize("language", ["en", "ja"])
def test_the_verdict_comes_first_and_claims_follow(language: Language) -> None:
    m = measured(loads=(1, 8), repeats=3)
    facts = judged(m)
    html = render(Report("x", m, language=language, **facts))
    text = Page(html).text
    places = [html.index(f'id="{name}"') for name in ("verdict", "claims", "effect", "cells")]
    assert places == sorted(places)
    words = OUTCOMES[language]
    for verdict in facts["verdicts"]:
        assert f"{words[verdict['outcome']]} " in text
        assert explain(verdict, language) in text
        assert advise(verdict, language) in text
    assert html.count('class="card verdict') == 2
    assert "enforce_eager: agg-tp4 true, pd-tp2 false" in text
    for claim in facts["claims"]:
        assert claim["claim"] in text
    assert html.count('<div class="claim"') == 3
    assert {claim["outcome"] for claim in facts["claims"]} >= {"contradicted"}
    assert ("集約構成のテール" in text) is (language == "ja")


def test_every_text_is_there_in_both_languages_with_the_same_gaps() -> None:
    for one, other in (
        (WORDS["en"], WORDS["ja"]),
        (REASONS["en"], REASONS["ja"]),
        (NEXT["en"], NEXT["ja"]),
        (CLAIM_REASONS["en"], CLAIM_REASONS["ja"]),
        (OUTCOMES["en"], OUTCOMES["ja"]),
        (METRICS["en"], METRICS["ja"]),
    ):
        assert one.keys() == other.keys()
        for key, text in one.items():
            gaps = {name for _, name, _, _ in Formatter().parse(text) if name}
            theirs = {name for _, name, _, _ in Formatter().parse(other[key]) if name}
            assert theirs <= gaps, key
            assert gaps - theirs <= {"are", "is", "was", "were"}, key
    assert set(FIGURES) == set(FIGURE_NAMES)


def test_what_engines_said_stands_with_their_layout(page: tuple[str, Measured]) -> None:
    facts = {"pd-tp2": {"dtype": {"prefill0": "bfloat16", "decode0": "float16"}, "block": {"decode0": "16"}}}
    text = Page(render(Report("x", page[1], plans=[pd_plan()], facts=facts))).text
    assert "What the engines said of themselves prefill0 decode0 block – 16 dtype bfloat16 float16" in text
    assert "What the engines said" not in Page(render(Report("x", page[1], plans=[pd_plan()]))).text


def test_without_a_pair_the_page_says_so() -> None:
    m = measured(loads=(1, 8), layouts=("agg-tp4", "pd-tp4"))
    assert "there is nothing to compare" in Page(render(Report("x", m))).text


def test_a_cell_of_another_environment_is_marked_on_the_page() -> None:
    found = tables(loads=(1, 8))
    cells = found["cells"]
    cells["environment_digest"] = "1" * 64
    odd = cells.index[3]
    cells.loc[odd, "environment_digest"] = "2" * 64
    m = Measured.from_frames(cells, found["requests"], found["tokens"], found["checks"])
    marked = [(row.cell_id, row.reasons[-1]) for row in cell_rows(m, "long", ["itl_ms"]) if row.reasons]
    said = f"made in environment 22222222, {len(cells) - 1} of {len(cells)} cells in 11111111"
    assert (cells.loc[odd, "cell_id"], ("environment", "warn", said)) in marked
    assert sum(reason[0] == "environment" for _, reason in marked) == 1
    assert said in render(Report("x", m))


def test_the_measurement_floor_is_on_the_page() -> None:
    row = {"streams": 16, "itl_error_p50_ms": 0.371, "itl_error_p99_ms": 7.9, "itl_error_max_ms": 9.0}
    row |= {"ttft_error_p50_ms": 1.5, "ttft_error_max_ms": 4.25, "merged_percent": 6.25}
    found = {"interval_ms": 20.0, "tokens": 64, "others_cpu_percent": 31.2, "rows": [row]}
    for language, heading in (("en", "Measurement floor"), ("ja", "測定の下限")):
        page = render(Report("x", measured(), language=language, floor=found))  # type: ignore[arg-type]
        text = Page(page).text
        assert heading in text
        assert "16 0.37 7.90 1.50 4.25 6.25 %" in text
        assert "31 %" in text
    lacking = Page(render(Report("x", measured(), floor={"rows": [], "why_not": "no client here"}))).text
    assert "Not known: no client here" in lacking
    assert "Measurement floor" not in Page(render(Report("x", measured()))).text
