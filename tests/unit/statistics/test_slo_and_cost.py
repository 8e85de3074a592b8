# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from splitbench.errors import UserError
from splitbench.statistics.capacity import (
    Point,
    Run,
    break_even,
    cost_per_million,
    goodput,
    largest_load,
    token_goodput,
)
from splitbench.statistics.quantiles import Interval
from splitbench.statistics.slo import Attainment, Slo, attained, attainment


def table(**columns):
    base = {"ok": [True] * 4, "output_tokens": [16] * 4, "ttft_ms": [1.0, 2.0, 3.0, 4.0]}
    for name in ("second_token_ms", "tpot_ms", "e2e_ms", "itl_mean_ms", "itl_p99_ms", "itl_max_ms"):
        base[name] = pa.array([None] * 4, pa.float64())
    return pa.table(base | columns)


def test_every_limit_counts_and_failures_miss():
    requests = table(ok=[True, True, False, True], tpot_ms=[5.0, 50.0, 5.0, 5.0])
    assert attained(requests, Slo(ttft_ms=3.5)).tolist() == [True, True, False, False]
    assert attained(requests, Slo(ttft_ms=9, tpot_ms=10)).tolist() == [True, False, False, True]
    assert attained(requests, Slo()).tolist() == [True, True, False, True]


@pytest.mark.parametrize("statistic", ["max", "p99", "mean"])
def test_itl_by_the_statistic_that_is_asked(statistic):
    requests = table(**{f"itl_{statistic}_ms": [1.0, 30.0, 31.0, 2.0]})
    assert attained(requests, Slo(itl_ms=30, itl_statistic=statistic)).tolist() == [True, True, False, True]


def test_single_token_answers_cannot_break_an_itl_limit():
    requests = table(output_tokens=[1, 16, 16, 1], itl_p99_ms=[None, 5.0, 50.0, None])
    assert attained(requests, Slo(itl_ms=10)).tolist() == [True, True, False, True]


def test_an_unknown_latency_misses_and_an_unrecorded_one_is_an_error():
    assert attained(table(tpot_ms=[1.0, None, 1.0, 1.0]), Slo(tpot_ms=2)).tolist() == [
        True,
        False,
        True,
        True,
    ]
    with pytest.raises(UserError, match="tpot_ms, which this source has not recorded"):
        attained(table(), Slo(tpot_ms=2))


def test_attainment_takes_the_spread_between_server_starts():
    met = np.array([True] * 100 + [True] * 50 + [False] * 50 + [True] * 98 + [False] * 2)
    starts = np.repeat([0, 1, 2], 100)
    by_start = attainment(met, starts, "restart")
    by_request = attainment(met, np.arange(300), "request")
    assert by_start.share == by_request.share == pytest.approx(248 / 300)
    assert by_start.interval.high - by_start.interval.low > 2 * (
        by_request.interval.high - by_request.interval.low
    )


def test_goodput_counts_every_accelerator_and_cost_only_sold_tokens():
    runs = [Run(0, 10.0, 50, 5000), Run(1, 10.0, 40, 4000), Run(2, 10.0, 60, 6000)]
    rate = goodput(runs, budget=4)
    assert rate.value == pytest.approx(5.0 / 4)
    assert rate.interval.low < rate.value < rate.interval.high and rate.units == 3
    assert token_goodput(runs, 4).value == pytest.approx(125.0)
    cost = cost_per_million(runs, budget=4, price_per_hour=3.6)
    assert cost.value == pytest.approx(3.6 / 3600 / 125 * 1e6)
    assert cost.interval.low < cost.value < cost.interval.high


def test_nothing_within_the_slo_costs_without_end():
    runs = [Run(0, 10.0, 0, 0), Run(1, 10.0, 0, 0)]
    assert math.isinf(cost_per_million(runs, 2, 1.0).value)
    one = cost_per_million([Run(0, 10.0, 5, 500)], 2, 1.0)
    assert math.isfinite(one.value) and math.isinf(one.interval.high) and one.interval.low == 0.0


def point(load, share, low):
    return Point(load, Attainment(share, Interval(low, 1.0), 0, 100, "restart", 3))


def test_largest_load_stops_at_the_first_that_fails():
    points = [point(16, 0.995, 0.97), point(8, 1.0, 0.995), point(32, 0.8, 0.7), point(64, 0.999, 0.99)]
    capacity = largest_load(points, 0.99)
    assert (capacity.served, capacity.proven, capacity.failing) == (16, 8, 32)
    assert capacity.text == "16"
    assert largest_load(points[:2], 0.99).text == ">= 16"
    nothing = largest_load([point(8, 0.5, 0.4)], 0.99)
    assert nothing.served is None and nothing.text == "< 8"


def test_break_even_along_an_axis():
    intervals = [Interval(c - 0.1, c + 0.1) for c in (0.3, 0.1, -0.1, -0.3)]
    found = break_even([4, 8, 16, 32], [0.3, 0.1, -0.1, -0.3], intervals)
    assert found.at == pytest.approx(8 * math.sqrt(2))
    assert found.better_below == "a"
    assert found.interval == Interval(pytest.approx(8), pytest.approx(16))
    never = break_even([1, 2], [-0.2, -0.1], [Interval(-0.3, -0.1), Interval(-0.2, 0.0)])
    assert never.at is None and never.better_below == "b"
    open_ended = break_even([1, 2], [0.1, -0.1], [Interval(-0.9, 0.9)] * 2)
    assert open_ended.interval == Interval(-math.inf, math.inf)
