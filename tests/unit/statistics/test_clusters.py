# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest

from splitbench.statistics.bootstrap import crossing_quantile, paired_differences, unit_weights
from splitbench.statistics.clusters import clustered, clustered_quantile, clustered_share, counts_below
from splitbench.statistics.variance import variance_split


def simulated(rng, restarts=3, requests=100, tokens=30, spread=0.05, scale=1.0):
    """Log-normal ITLs with a common effect per server start and per request."""
    start = rng.normal(0, spread, (restarts, 1, 1))
    request = rng.normal(0, 0.1, (restarts, requests, 1))
    values = scale * np.exp(start + request + rng.normal(0, 0.15, (restarts, requests, tokens)))
    labels = np.broadcast_to(np.arange(restarts)[:, None, None], values.shape)
    return clustered(values.ravel(), labels.ravel(), "restart", restarts * requests)


def test_counts_do_not_depend_on_how_the_values_come():
    rng = np.random.default_rng(1)
    values, labels = rng.random(1000), rng.integers(0, 4, 1000)
    whole = clustered(values, labels, "restart")
    below, total = counts_below(whole, 0.3)
    for unit in range(4):
        assert below[unit] == np.sum(values[labels == unit] <= 0.3)
        assert total[unit] == np.sum(labels == unit)


def test_interval_holds_the_truth_about_as_often_as_it_says():
    hits = 0
    for seed in range(200):
        reading = clustered_quantile(simulated(np.random.default_rng(seed), spread=0.05), 0.9)
        truth = math.exp(1.2815515655446004 * math.sqrt(0.05**2 + 0.1**2 + 0.15**2))
        hits += reading.interval.low <= truth <= reading.interval.high
    assert 183 <= hits <= 199  # binomial(200, 0.95) with room for the seeds; 0.75 would give 150


def test_token_count_never_narrows_the_interval():
    """Values that are copies of one per request know no more than one per request."""
    rng = np.random.default_rng(2)
    per_request = rng.lognormal(size=400)
    once = clustered(per_request, np.arange(400), "request")
    copied = clustered(np.repeat(per_request, 50), np.repeat(np.arange(400), 50), "request", 400)
    a, b = clustered_quantile(once, 0.9), clustered_quantile(copied, 0.9)
    assert b.interval.high - b.interval.low > 0.7 * (a.interval.high - a.interval.low)
    assert b.gate.n == 400


def test_one_unit_gives_no_interval_and_no_support_is_said():
    reading = clustered_quantile(clustered(np.arange(50.0), np.zeros(50, int), "run", 50), 0.99)
    assert math.isinf(reading.interval.high) and math.isinf(reading.interval.low)
    assert reading.text == ">= 48.5 (n=50, needs 368)"


def test_share_of_all_and_none_is_not_certain():
    share, interval = clustered_share(np.array([100.0, 100, 100]), np.array([100.0, 100, 100]))
    assert share == 1.0 and 0.9 < interval.low < 1.0 and interval.high == 1.0
    share, interval = clustered_share(np.array([0.0, 0, 0]), np.array([100.0, 100, 100]))
    assert share == 0.0 and interval.low == 0.0 and 0.0 < interval.high < 0.1


def test_weights_sum_to_the_number_of_units_and_repeat_with_their_seed():
    weights = unit_weights(5, 400, 3)
    assert weights.sum(axis=1) == pytest.approx(np.full(400, 5.0))
    assert weights.mean() == pytest.approx(1.0)
    assert np.array_equal(weights, unit_weights(5, 400, 3))
    assert weights.var(axis=0).mean() == pytest.approx(1.0, abs=0.15)  # 5/4 * (1 - 1/5)


def test_paired_differences_find_what_was_put_in():
    rng = np.random.default_rng(4)
    a = simulated(rng, restarts=4)
    b = simulated(rng, restarts=4, scale=0.7)
    median, tail = paired_differences(a, b, [0.5, 0.99])
    assert median.change == pytest.approx(-0.3, abs=0.07)
    assert median.interval.low < median.change < median.interval.high < 0
    assert median.paired and median.units == 4 and median.level == "restart"
    assert tail.gate.needs == 368 and tail.seed == median.seed
    again, _ = paired_differences(a, b, [0.5, 0.99])
    assert again == median


def test_pairing_takes_out_what_both_sides_share():
    rng = np.random.default_rng(5)
    common = rng.normal(0, 0.5, 300)
    labels = np.arange(300)
    a = clustered(np.exp(common + rng.normal(0, 0.02, 300)), labels, "request")
    b = clustered(1.1 * np.exp(common + rng.normal(0, 0.02, 300)), labels, "request")
    fewer = clustered(1.1 * np.exp(common + rng.normal(0, 0.02, 300))[:299], labels[:299], "request")
    paired = paired_differences(a, b, [0.5])[0]
    apart = paired_differences(a, fewer, [0.5])[0]
    assert paired.paired and not apart.paired
    width = [d.interval.high - d.interval.low for d in (paired, apart)]
    assert width[0] < 0.5 * width[1]
    assert paired.interval.low < 0.1 < paired.interval.high


def test_a_single_unit_decides_nothing():
    a = clustered(np.arange(1.0, 100), np.zeros(99, int), "run")
    difference = paired_differences(a, a, [0.5])[0]
    assert math.isinf(difference.interval.high) and difference.interval.low == -1.0


def test_crossing_is_found_where_it_is():
    rng = np.random.default_rng(6)
    n = 4000
    body_better = np.where(rng.random(n) < 0.03, rng.normal(80, 3, n), rng.normal(10, 0.5, n))
    tail_better = rng.normal(14, 1, n)
    a = clustered(body_better, np.arange(n), "request")
    b = clustered(tail_better, np.arange(n), "request")
    crossing = crossing_quantile(a, b)
    assert crossing.p == pytest.approx(0.97, abs=0.006)
    assert crossing.lower_below == "a" and crossing.share > 0.95
    assert crossing.interval is not None and crossing.interval.low < 0.97 < crossing.interval.high
    assert crossing_quantile(b, a).lower_below == "b"
    never = crossing_quantile(a, clustered(body_better + 5, np.arange(n), "request"))
    assert never.p is None and never.lower_below == "a"


def test_variance_split_finds_the_components():
    rng = np.random.default_rng(7)
    restarts, runs, requests = 40, 5, 30
    restart = np.repeat(np.arange(restarts), runs * requests)
    run = np.tile(np.repeat(np.arange(runs), requests), restarts)
    values = (
        rng.normal(0, 3, restarts)[restart]
        + rng.normal(0, 2, (restarts, runs))[restart, run]
        + rng.normal(0, 1, len(run))
    )
    keep = rng.random(len(values)) < 0.7  # unequal numbers
    split = variance_split(values[keep], restart[keep], run[keep])
    assert split.restart == pytest.approx(9, rel=0.5)
    assert split.run == pytest.approx(4, rel=0.25)
    assert split.request == pytest.approx(1, rel=0.1)
    assert sum(split.shares.values()) == pytest.approx(1)


def test_variance_split_says_what_it_cannot_tell():
    values = np.random.default_rng(8).random(30)
    one = variance_split(values, np.zeros(30, int), np.zeros(30, int))
    assert one.restart is None and one.run is None and one.request == pytest.approx(values.var(ddof=1))
    single_runs = variance_split(values, np.repeat([0, 1, 2], 10), np.zeros(30, int))
    assert single_runs.run is None and single_runs.restart is not None
