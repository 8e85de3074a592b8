# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitbench.statistics import quantiles as q

VALUES = st.lists(st.floats(allow_nan=False), min_size=1, max_size=80) | st.lists(
    st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0, 1e300, 5e-324, math.inf, -math.inf]), min_size=1, max_size=80
)
COUNTS = st.integers(0, 9)
LEVELS = st.lists(st.floats(0, 1), min_size=1, max_size=5)
POINTS = st.lists(st.floats(-100, 100), min_size=1, max_size=30)


@settings(deadline=None, max_examples=150)
@given(
    values=VALUES,
    ps=LEVELS,
    pieces=st.integers(1, 5),
    held=COUNTS,
)
def test_quantiles_equal_numpys_on_any_input(values, ps, pieces, held):
    array = np.array(values)
    saved = q._COLLECT
    q._COLLECT = held  # a small one takes the deeper levels of the selection
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = np.quantile(array, ps)
            streamed = q.quantiles(lambda: iter(np.array_split(array, pieces)), ps)
            direct = q.quantiles(array, ps)
    finally:
        q._COLLECT = saved
    np.testing.assert_array_equal(direct, expected)
    if np.isfinite(array).all():
        np.testing.assert_array_equal(q.sorted_quantiles(np.sort(array), ps), expected)
    np.testing.assert_array_equal(streamed, expected)


def test_nan_and_nothing():
    with_nan = np.array([1.0, np.nan])
    assert np.isnan(q.quantiles(lambda: [with_nan], [0.5])).all()
    assert np.isnan(q.quantiles(lambda: [np.empty(0)], [0.5])).all()
    assert np.isnan(q.quantiles(np.empty(0), [0.5, 0.9])).all()
    with pytest.raises(ValueError, match="between 0 and 1"):
        q.quantiles(with_nan, [99])


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60))
def test_ecdf_and_survival_count_exactly(values):
    array = np.array(values)
    x, y = q.ecdf(array)
    for point, share in zip(x, y, strict=True):
        assert share == np.mean(array <= point)
    np.testing.assert_allclose(q.survival(array).y, 1 - y)
    streamed = q.ecdf(lambda: np.array_split(array, 3))
    for point, share in zip(*streamed, strict=True):
        assert share == pytest.approx(np.mean(array <= point))


@given(POINTS, POINTS)
def test_ecdf_at_counts_at_and_below(values, points):
    array, grid = np.array(values), np.sort(np.array(points))
    expected = [np.mean(array <= point) for point in grid]
    assert q.ecdf_at(array, grid) == pytest.approx(expected)
    assert q.ecdf_at(lambda: np.array_split(array, 2), grid) == pytest.approx(expected)


@pytest.mark.parametrize(
    "values", [[0.0, -0.0], [-5e-324, 0.0], [-1.0, 5e-324, 0.0], [math.inf, -math.inf, 0.0]]
)
def test_streamed_ecdf_around_zero_and_at_the_ends(values):
    array = np.array(values)
    for point, share in zip(*q.ecdf(lambda: [array]), strict=True):
        assert share == pytest.approx(np.mean(array <= point))


def test_streamed_ecdf_is_fine_enough_to_draw():
    values = np.random.default_rng(1).lognormal(2, 1, 100_000)
    x, _ = q.ecdf(lambda: np.array_split(values, 7))
    body = x[(x > np.quantile(values, 0.05)) & (x < np.quantile(values, 0.95))]
    assert np.max(np.diff(body) / body[:-1]) < 0.003


def test_support_is_the_table_of_the_method():
    assert [q.needed(p) for p in (0.9, 0.95, 0.99, 0.995, 0.999)] == [36, 72, 368, 736, 3688]
    assert q.needed(0.1) == q.needed(0.9)
    with pytest.raises(ValueError):
        q.needed(1.0)


def test_an_unsupported_percentile_is_printed_as_a_bound():
    values = np.arange(320.0)
    reading = q.read_quantile(values, 0.99)
    assert not reading.gate.supported and math.isinf(reading.interval.high)
    assert reading.text == f">= {reading.interval.low:.1f} (n=320, needs 368)"
    assert q.read_quantile(np.arange(368.0), 0.99).gate.supported
    assert math.isfinite(q.read_quantile(np.arange(368.0), 0.99).interval.high)
    assert q.read_quantile(np.arange(400.0), 0.99).text == "395.0"
    assert q.read_quantile(np.arange(20.0), 0.1).text.startswith("<= ")
    assert q.read_quantile(np.empty(0), 0.99).text == "none (n=0)"


@pytest.mark.parametrize(("n", "p"), [(36, 0.9), (100, 0.5), (72, 0.95), (500, 0.99), (368, 0.99)])
def test_order_statistic_interval_keeps_its_promise(n, p):
    from scipy.stats import binom

    ordered = np.arange(1, n + 1, dtype=float)
    interval = q.quantile_interval(ordered, p)
    low, high = int(interval.low), int(interval.high)
    # Chance that the low end lies above the quantile, and that the high end lies at or below it.
    assert binom.cdf(low - 1, n, p) <= 0.025 < binom.cdf(low, n, p)
    assert binom.sf(high - 1, n, p) <= 0.025 < binom.sf(high - 2, n, p)
