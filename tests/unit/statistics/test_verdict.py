# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from synthetic import around, pools

from splitbench.statistics.verdict import input_break_even, verdicts
from splitbench.wording import advise, explain

SLO = {"itl_ms": 30, "ttft_ms": None, "percentile": 99}


def by_layout(agg, pd):
    """Latencies that depend on the layout's kind and the load."""

    def values(workload, layout, load, metric, rng, n):
        middle = (pd if layout.startswith("pd") else agg)(metric, load)
        return around(middle)(rng, n)

    return values


def steady(middle):
    return lambda metric, load: middle


def one(found):
    (verdict,) = found
    return verdict


def test_pd_wins_where_it_is_surely_better_by_more_than_the_margin():
    verdict = one(verdicts(pools(by_layout(steady(20), steady(10))), SLO, 5))
    assert verdict["outcome"] == "wins"
    assert verdict["load"] == 32
    (difference,) = [d for d in verdict["differences"] if d["deciding"]]
    assert difference["low"] < difference["change"] < difference["high"] < -0.05
    assert difference["change"] == pytest.approx(-0.5, abs=0.03)
    assert (difference["level"], difference["units"], difference["paired"]) == ("restart", 3, True)
    sentence = explain(verdict, "en")
    assert sentence.startswith("The P99 ITL is") and "lower" in sentence and "margin of 5 %" in sentence
    assert "P99 ITL" in explain(verdict, "ja")


def test_pd_loses_where_it_is_surely_worse():
    verdict = one(verdicts(pools(by_layout(steady(10), steady(20))), SLO, 5))
    assert verdict["outcome"] == "loses"
    assert "higher" in explain(verdict, "en")


def test_a_small_difference_is_none_even_if_it_is_sure():
    found = pools(by_layout(steady(20), steady(19)), requests=2000, loads=[32])
    wide = one(verdicts(found, SLO, 20))
    assert (wide["outcome"], wide["reasons"][0]["code"]) == ("undecided", "no_difference")
    assert wide["next"] == {"code": "higher_load", "load": 32}
    assert one(verdicts(found, SLO, 1))["outcome"] == "wins"


def test_a_wide_interval_leaves_it_open():
    def values(workload, layout, load, metric, rng, n):
        # Restarts differ by a lot, in another direction for each layout.
        shift = rng.lognormal(0, 0.5)
        return around(20 * shift)(rng, n)

    verdict = one(verdicts(pools(values), {**SLO, "itl_ms": 1000}, 5))
    assert verdict["outcome"] == "undecided"
    assert verdict["reasons"][0]["code"] == "unclear"
    assert verdict["next"]["code"] == "more_units"
    assert "independent units" in advise(verdict, "en") and advise(verdict, "ja")


@pytest.mark.parametrize(("restarts", "repeats"), [(1, 1), (2, 1), (1, 3)])
def test_too_few_repeats_or_restarts_decide_nothing(restarts, repeats):
    found = pools(by_layout(steady(20), steady(10)), restarts=restarts, repeats=repeats, requests=600)
    verdict = one(verdicts(found, SLO, 5))
    assert verdict["outcome"] == "undecided"
    assert verdict["reasons"][0]["code"] == "few_repeats"
    assert verdict["next"]["code"] == "more_restarts"
    assert f"only {restarts * repeats} of the 3 valid runs" in explain(verdict, "en")
    assert "lower" in explain(verdict, "en")  # what the samples read is said all the same


def test_three_runs_over_two_starts_are_enough():
    found = pools(by_layout(steady(20), steady(10)), restarts=2, repeats=2, requests=600)
    # Two units have a t of 12.7: only a difference without spread between starts gets through.
    assert "few_repeats" not in {r["code"] for r in one(verdicts(found, SLO, 5))["reasons"]}


def test_a_percentile_that_the_requests_cannot_support_decides_nothing():
    verdict = one(verdicts(pools(by_layout(steady(20), steady(10)), requests=50), SLO, 5))
    assert verdict["outcome"] == "undecided"
    assert verdict["reasons"][0] == {
        "code": "few_requests",
        "statistic": "p99",
        "metric": "itl_ms",
        "n": 150,
        "needs": 368,
    }
    assert "368" in advise(verdict, "en")


def test_the_slo_chooses_the_load_that_decides():
    # Aggregated keeps 30 ms up to 8, PD up to 8 too; at 32 neither does.
    grown = by_layout(lambda m, load: 15 + load, lambda m, load: 10 + load)
    verdict = one(verdicts(pools(grown), SLO, 5))
    assert verdict["load"] == 8
    assert verdict["highest_load"] == {"agg4": 8, "pd4": 8}
    # Neither keeps it anywhere: the lowest load decides.
    assert one(verdicts(pools(grown), {**SLO, "itl_ms": 5}, 5))["load"] == 1
    # No limit: the highest.
    assert one(verdicts(pools(grown), {**SLO, "itl_ms": None}, 5))["load"] == 32


def test_equal_layouts_are_parted_where_both_lose_the_slo():
    alike = by_layout(lambda m, load: 15 + load, lambda m, load: 15.1 + load)
    verdict = one(verdicts(pools(alike, requests=1000, loads=[8, 32]), SLO, 20))
    assert (verdict["outcome"], verdict["reasons"][0]["code"]) == ("undecided", "no_difference")
    assert verdict["next"] == {"code": "between_loads", "load": 8, "above": 32}
    assert "between c=8 and c=32" in advise(verdict, "en")


def test_the_slo_settles_latencies_that_disagree():
    mixed = by_layout(
        lambda metric, load: 40 if metric == "itl_ms" else 100,
        lambda metric, load: 20 if metric == "itl_ms" else 150,
    )
    # Three starts know a P99's upper end only from many requests.
    found = pools(mixed, loads=[32], requests=1000)
    limits = {"itl_ms": 30, "ttft_ms": 300, "percentile": 99}
    verdict = one(verdicts(found, limits, 5))
    assert (verdict["outcome"], verdict["reasons"][0]["keeper"]) == ("wins", "pd4")
    limits = {"itl_ms": 60, "ttft_ms": 130, "percentile": 99}
    verdict = one(verdicts(found, limits, 5))
    assert (verdict["outcome"], verdict["reasons"][0]["keeper"]) == ("loses", "agg4")
    limits = {"itl_ms": 60, "ttft_ms": 300, "percentile": 99}
    verdict = one(verdicts(found, limits, 5))
    assert (verdict["outcome"], verdict["reasons"][0]["code"]) == ("undecided", "mixed")
    assert verdict["next"]["code"] == "tighter_slo"
    assert "ITL is better but the P99 TTFT worse" in explain(verdict, "en")


def test_invalid_cells_are_left_out_and_named():
    found = pools(by_layout(steady(20), steady(10)), invalid=[("pd4", 32)])
    verdict = one(verdicts(found, SLO, 5))
    assert verdict["load"] == 8
    assert verdict["invalid_cells"] == [f"pd4/long/c32/{k}-0" for k in range(3)]
    all_of_it = [("pd4", load) for load in (1, 8, 32)]
    verdict = one(verdicts(pools(by_layout(steady(20), steady(10)), invalid=all_of_it), SLO, 5))
    assert (verdict["outcome"], verdict["reasons"][0]["code"]) == ("undecided", "no_shared_load")
    assert verdict["next"] == {"code": "measure_valid", "cells": 9}
    assert explain(verdict, "en") and advise(verdict, "ja")


def test_break_even_along_concurrency_and_input_length():
    def values(workload, layout, load, metric, rng, n):
        if not layout.startswith("pd"):
            return around(20.0, 0.02)(rng, n)
        # PD is worse below c=16 and 4,096 tokens, better above.
        factor = (16 / load) ** 0.1 * (4096 / {"short": 1024, "long": 8192}[workload]) ** 0.1
        return around(20.0 * factor, 0.02)(rng, n)

    found = pools(values, workloads=[("short", 1024), ("long", 8192)], loads=[1, 4, 16, 64])
    both = verdicts(found, {**SLO, "itl_ms": 1000}, 5)
    places = {v["workload"]: v["break_even"][0] for v in both}
    # short: 16 * 4096/1024 = 64; long: 16 * 4096/8192 = 8.
    assert places["long"]["at"] == pytest.approx(8, rel=0.15)
    assert places["long"]["low"] < 8 < places["long"]["high"]
    assert places["long"]["better_below"] == "reference"
    lines = {line["load"]: line for line in input_break_even(both, found)}
    assert lines[16]["at"] == pytest.approx(4096, rel=0.15)
    assert lines[16]["output_tokens"] == 128
    assert lines[1]["at"] is None or lines[1]["at"] > 8000


def test_only_equal_budgets_are_compared_and_asymmetries_go_beside():
    found = pools(by_layout(steady(20), steady(10)), layouts=("agg4", "pd4", "agg8", "pd8"))
    told = [{"layouts": ["agg8", "pd8"], "reason": "enforce_eager: agg8 true, pd8 false"}]
    pairs = {(v["reference"], v["layout"]): v for v in verdicts(found, SLO, 5, told)}
    assert set(pairs) == {("agg4", "pd4"), ("agg8", "pd8")}
    assert pairs["agg8", "pd8"]["asymmetries"] == told
    assert pairs["agg4", "pd4"]["asymmetries"] == []
    of_budget = [{"budget": "4 GPUs", "reason": "dtype: agg4 bfloat16, pd4 float16"}]
    pairs = {(v["reference"], v["layout"]): v for v in verdicts(found, SLO, 5, of_budget)}
    assert pairs["agg4", "pd4"]["asymmetries"] == of_budget
    assert pairs["agg8", "pd8"]["asymmetries"] == []


def test_a_shared_accelerator_is_named_beside_the_verdict():
    found = pools(by_layout(steady(20), steady(10)), layouts=("agg4", "pd4", "agg8", "pd4-shared"))
    pairs = {(v["reference"], v["layout"]): v for v in verdicts(found, SLO, 5)}
    assert set(pairs) == {("agg4", "pd4"), ("agg4", "pd4-shared")}
    assert pairs["agg4", "pd4"]["asymmetries"] == []
    shared = pairs["agg4", "pd4-shared"]
    assert shared["shares"] == {"agg4": None, "pd4-shared": "mps 50+50"}
    (told,) = shared["asymmetries"]
    assert told["reason"] == "share of the accelerators: agg4 an engine per accelerator; pd4-shared mps 50+50"


def test_ttfts_of_different_content_are_not_compared():
    found = pools(by_layout(steady(20), steady(10)), layouts=("agg8", "pd8"))
    verdict = one(verdicts(found, {"itl_ms": None, "ttft_ms": 100, "percentile": 99}, 5))
    assert {d["metric"] for d in verdict["differences"]} == {"second_token_ms"}
    found = pools(by_layout(steady(20), steady(10)), layouts=("agg4", "pd4"))
    verdict = one(verdicts(found, {"itl_ms": None, "ttft_ms": 100, "percentile": 99}, 5))
    assert {d["metric"] for d in verdict["differences"]} == {"ttft_ms"}


def test_no_latencies_at_all():
    verdict = one(verdicts(pools(lambda *a: np.empty(0)), SLO, 5))
    assert (verdict["outcome"], verdict["reasons"][0]["code"]) == ("undecided", "no_latencies")
