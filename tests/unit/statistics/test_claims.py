# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from synthetic import around, pools

from splitbench.errors import UserError
from splitbench.experiment.claims import Claim, ClaimTest
from splitbench.experiment.load import load_experiment, read_experiment, read_yaml
from splitbench.statistics.claims import NO, UNKNOWN, YES, all_of, judge_claims, most_of
from splitbench.statistics.steps import count_steps

REPOSITORY = Path(__file__).parents[3]


def judged(found, *tests, margin=5):
    claim = Claim.model_validate({"says": "it is so", "tests": [{"workload": "long", **t} for t in tests]})
    (result,) = judge_claims({"it": claim}, found, margin)
    return result


def flat(agg, pd, spread=0.05):
    """One middle per layout, at every load."""

    def values(workload, layout, load, metric, rng, n):
        return around(pd if layout.startswith("pd") else agg, spread)(rng, n)

    return values


def shaky(workload, layout, load, metric, rng, n):
    """Restarts that differ so much that nothing can be decided."""
    return around(20 * rng.lognormal(0, 0.6))(rng, n)


ITL = {"metric": "itl_ms", "layout": "pd4"}
PAIR = {**ITL, "reference": "agg4", "concurrency": 32}


def test_a_claim_across_budgets_says_so():
    found = pools(flat(20, 10), layouts=("agg4", "pd4", "agg8", "pd4-shared"), loads=[32], requests=1000)
    test = {**ITL, "relation": "lower", "concurrency": 32}
    result = judged(found, {**test, "reference": "agg4"}, {**test, "reference": "agg8"})
    assert [one["budgets"] for one in result["tests"]] == [{}, {"pd4": "4 GPUs", "agg8": "8 GPUs"}]
    result = judged(found, {**test, "layout": "pd4-shared", "reference": "agg8"})
    assert result["tests"][0]["budgets"]["pd4-shared"] == "4 GPUs, mps 50+50"


@pytest.mark.parametrize(
    ("relation", "yes", "no"),
    [
        # relation and what else it takes, then (agg, pd) that reproduces it and that contradicts it
        ({"relation": "lower"}, (20, 10), (10, 20)),
        ({"relation": "lower", "by_percent": 30}, (20, 10), (20, 18)),
        ({"relation": "higher"}, (10, 20), (20, 10)),
        ({"relation": "higher", "by_percent": 30}, (10, 20), (20, 21)),
        ({"relation": "not_lower"}, (10, 20), (20, 10)),
        ({"relation": "not_higher"}, (20, 10), (10, 20)),
        ({"relation": "serves_no_more", "threshold": 30}, (20, 40), (40, 20)),
    ],
)
@pytest.mark.parametrize("statistic", ["p99", "p50", "mean"])
def test_relations_between_layouts(relation, yes, no, statistic):
    test = {**PAIR, "statistic": statistic, **relation}
    size = {"loads": [32], "requests": 1000}
    assert judged(pools(flat(*yes), **size), test)["outcome"] == YES
    assert judged(pools(flat(*no), **size), test)["outcome"] == NO
    open_ended = judged(pools(shaky, **size), test)
    assert open_ended["outcome"] == UNKNOWN
    assert open_ended["reads"] in (YES, NO)


@pytest.mark.parametrize(("relation", "yes", "no"), [("at_most", 20, 40), ("above", 40, 20)])
@pytest.mark.parametrize("statistic", ["p99", "p50", "mean"])
def test_thresholds(relation, yes, no, statistic):
    test = {**ITL, "relation": relation, "threshold": 30, "concurrency": [8, 32], "statistic": statistic}
    size = {"loads": [8, 32], "requests": 1000, "layouts": ["pd4"]}
    found = judged(pools(flat(1, yes), **size), test)
    assert found["outcome"] == YES
    figures = found["tests"][0]["figures"]
    assert [figure["load"] for figure in figures] == [8, 32]
    assert all(figure["low_ms"] < figure["value_ms"] < figure["high_ms"] for figure in figures)
    assert judged(pools(flat(1, no), **size), test)["outcome"] == NO
    # A threshold amid the interval: restarts differ too much to tell.
    middle = judged(pools(shaky, **size), test)["tests"][0]["figures"][0]["value_ms"]
    assert judged(pools(shaky, **size), {**test, "threshold": middle, "concurrency": 8})["outcome"] == UNKNOWN


def test_a_sample_too_small_for_the_percentile_still_bounds_it_from_below():
    small = pools(flat(1, 40), restarts=1, requests=100)
    above = judged(small, {**ITL, "relation": "above", "threshold": 30})
    assert above["outcome"] == YES
    within = judged(small, {**ITL, "relation": "at_most", "threshold": 60})
    assert (within["outcome"], within["reads"]) == (UNKNOWN, YES)
    assert within["tests"][0]["figures"][0]["reason"]["code"] == "few_requests"
    compared = judged(pools(flat(40, 10), restarts=1, requests=100), {**PAIR, "relation": "lower"})
    assert (compared["outcome"], compared["reads"]) == (UNKNOWN, YES)
    assert compared["tests"][0]["figures"][0]["reason"] == {
        "code": "few_requests",
        "statistic": "p99",
        "n": 100,
        "needs": 368,
    }


def by_load(factor):
    def values(workload, layout, load, metric, rng, n):
        return around(factor(load))(rng, n)

    return values


def test_growth_over_all_loads():
    test = {**ITL, "relation": "grows"}
    grown = judged(pools(by_load(lambda load: 10 + load)), test)
    assert grown["outcome"] == YES
    assert grown["tests"][0]["figures"][0]["loads"] == [1, 8, 32]
    assert judged(pools(by_load(lambda load: 50 - load)), test)["outcome"] == NO
    # Higher at the end, but it falls on the way.
    assert judged(pools(by_load({1: 10, 8: 40, 32: 20}.__getitem__)), test)["outcome"] == NO
    assert judged(pools(by_load(lambda load: 20)), test)["outcome"] == UNKNOWN
    assert judged(pools(by_load(lambda load: 20), loads=(8,)), test)["outcome"] == UNKNOWN


def with_tail(share_agg, share_pd):
    """The body of the aggregated is lower, its tail higher by far."""

    def values(workload, layout, load, metric, rng, n):
        body, tail, share = (12, 14, share_pd) if layout.startswith("pd") else (10, 100, share_agg)
        found = around(body, 0.02)(rng, n)
        found[: round(share * n)] = around(tail, 0.02)(rng, round(share * n))
        return found

    return values


def test_a_crossing_within_a_range():
    test = {**PAIR, "relation": "crosses", "between": [97, 99.5]}
    found = judged(pools(with_tail(0.01, 0.0), requests=2000), test)
    assert found["outcome"] == YES
    figure = found["tests"][0]["figures"][0]
    assert figure["percentile"] == pytest.approx(99, abs=0.3)
    assert figure["low_percentile"] <= figure["percentile"] <= figure["high_percentile"]
    far = judged(pools(with_tail(0.2, 0.0), requests=2000), test)
    assert (far["outcome"], far["reads"]) == (NO, NO)
    assert judged(pools(flat(20, 10), requests=2000), test)["outcome"] == NO
    few = judged(pools(with_tail(0.02, 0.0), requests=30), test)
    assert few["outcome"] == UNKNOWN


def stairs(steps, width):
    def values(workload, layout, load, metric, rng, n):
        return 200 * (1 + np.arange(n) % steps) + rng.normal(0, width, n)

    return values


def test_stairs():
    test = {"metric": "ttft_ms", "layout": "agg4", "relation": "stairs", "threshold": 3, "concurrency": 32}
    assert judged(pools(stairs(8, 12), restarts=1), test)["outcome"] == YES
    assert judged(pools(flat(200, 200, 0.3), restarts=1, requests=320), test)["outcome"] == NO
    few = judged(pools(stairs(8, 12), restarts=1, requests=40), test)
    assert (few["outcome"], few["reads"]) == (UNKNOWN, YES)


@pytest.mark.parametrize("name", ["normal", "lognormal", "exponential"])
def test_smooth_distributions_have_no_steps(name):
    wrong = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        values = {
            "normal": rng.normal(300, 60, 320),
            "lognormal": rng.lognormal(5, 0.5, 320),
            "exponential": rng.exponential(200, 320),
        }[name]
        wrong += count_steps(values).low >= 3
    assert wrong == 0


def test_steps_of_little_data():
    assert count_steps(np.array([5.0])).count == 1
    assert count_steps(np.full(50, 5.0)).count == 1


def two_workloads(gain_short, gain_long):
    def values(workload, layout, load, metric, rng, n):
        gain = {"short": gain_short, "long": gain_long}[workload]
        return around(100 * (1 - gain if layout.startswith("pd") else 1))(rng, n)

    return values


def test_a_smaller_gain_on_another_workload():
    test = {
        "metric": "ttft_ms",
        "relation": "smaller_gain",
        "workload": "short",
        "other_workload": "long",
        "layout": "pd4",
        "reference": "agg4",
        "concurrency": 32,
        "statistic": "mean",
    }
    kinds = [("short", 1024), ("long", 8192)]
    assert judged(pools(two_workloads(0.1, 0.5), workloads=kinds), test)["outcome"] == YES
    assert judged(pools(two_workloads(0.5, 0.1), workloads=kinds), test)["outcome"] == NO
    assert judged(pools(shaky, workloads=kinds), test)["outcome"] == UNKNOWN


def test_all_or_most_comparisons_have_to_agree():
    def values(workload, layout, load, metric, rng, n):
        # PD is lower at two of three loads.
        better = layout.startswith("pd") and load != 1
        return around(10 if better else 20)(rng, n) * (1.5 if layout.startswith("pd") and load == 1 else 1)

    test = {**ITL, "reference": "agg4", "relation": "lower"}
    assert judged(pools(values), test)["outcome"] == NO
    assert judged(pools(values), {**test, "agree": "most"})["outcome"] == YES
    assert all_of([YES, UNKNOWN]) == UNKNOWN
    assert all_of([]) == UNKNOWN
    assert most_of([YES, NO]) == UNKNOWN
    assert most_of([NO, NO, YES]) == NO


def test_one_contradicted_test_contradicts_the_claim():
    found = pools(flat(20, 10))
    lower, higher = {**PAIR, "relation": "lower"}, {**PAIR, "relation": "higher"}
    assert judged(found, lower, higher)["outcome"] == NO
    assert [test["outcome"] for test in judged(found, lower, higher)["tests"]] == [YES, NO]


def test_cells_that_are_missing_or_invalid_decide_nothing():
    found = pools(flat(20, 10), invalid=[("pd4", 32)])
    for relation in ({"relation": "lower"}, {"relation": "serves_no_more", "threshold": 30}):
        result = judged(found, {**PAIR, **relation})
        assert (result["outcome"], result["reads"]) == (UNKNOWN, UNKNOWN)
        assert result["tests"][0]["figures"][0]["reason"]["code"] == "no_valid_cell"
    elsewhere = judged(found, {**ITL, "layout": "pd8", "relation": "at_most", "threshold": 1})
    assert elsewhere["tests"][0]["figures"][0]["reason"]["code"] == "not_measured"


def test_a_claim_on_ttfts_of_different_content_is_judged_as_made_and_marked():
    found = pools(flat(20, 10), layouts=("agg8", "pd8"))
    test = {"metric": "ttft_ms", "layout": "pd8", "reference": "agg8", "relation": "lower"}
    result = judged(found, test)
    assert result["tests"][0]["mixed_content"] is True
    assert result["outcome"] == YES


@pytest.mark.parametrize(
    "wrong",
    [
        {"relation": "lower"},
        {"relation": "at_most"},
        {"relation": "grows", "reference": "agg4"},
        {"relation": "lower", "reference": "agg4", "threshold": 3},
        {"relation": "crosses", "reference": "agg4"},
        {"relation": "crosses", "reference": "agg4", "between": [99, 90]},
        {"relation": "smaller_gain", "reference": "agg4"},
        {"relation": "grows", "statistic": "p"},
        {"relation": "grows", "statistic": "median"},
        {"relation": "grows", "statistic": []},
    ],
)
def test_claims_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValidationError):
        ClaimTest.model_validate({"workload": "long", **ITL, **wrong})


def test_claims_may_only_name_what_the_experiment_has():
    config = read_yaml(REPOSITORY / "config" / "config.yaml")
    test = config["claims"]["pd-shields-decode"]["tests"][0]
    for key, value in (("layout", "pd"), ("reference", "agg"), ("workload", "lon"), ("concurrency", 5)):
        changed = {**config, "claims": {"one": {"says": "x", "tests": [{**test, key: value}]}}}
        with pytest.raises(UserError, match=rf"claims\.one\.tests\[0\]\.{key}: no .*{value}"):
            load_experiment(changed)


def test_claims_may_name_a_workloads_own_loads():
    config = read_yaml(REPOSITORY / "config" / "config.yaml")
    workloads = {**config["workloads"], "long": {**config["workloads"]["long"], "concurrency": [5]}}
    test = {**config["claims"]["pd-shields-decode"]["tests"][0], "concurrency": 5}
    claims = {"one": {"says": "x", "tests": [test]}}
    load_experiment({**config, "workloads": workloads, "claims": claims})
    claims = {"one": {"says": "x", "tests": [{**test, "concurrency": 8}]}}
    with pytest.raises(UserError, match="no cell has concurrency 8"):
        load_experiment({**config, "workloads": workloads, "claims": claims})


def test_the_reference_experiment_carries_all_thirteen_findings():
    claims = read_experiment(REPOSITORY / "config" / "experiments" / "sakura-h100.yaml").claims
    assert list(claims) == [
        "ITL-8k-agg",
        "ITL-8k-pd",
        "ITL-8k-win",
        "ITL-fewer",
        "TTFT-gpus",
        "TTFT-tail",
        "TTFT-mean",
        "TTFT-stairs",
        "ITL-1k",
        "ITL-1k-cross",
        "TTFT-1k",
        "SLO-agg",
        "scale-apart",
    ]
    assert all(claim.says and claim.says_ja for claim in claims.values())
