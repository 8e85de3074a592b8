# SPDX-License-Identifier: Apache-2.0
"""Thinned curves against brute force over all samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitbench.figures.ecdf import Extent, drawn_steps, share_at

samples = st.lists(st.floats(0.001, 1e4, allow_nan=False), min_size=1, max_size=300).map(
    lambda values: np.sort(np.array(values))
)


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    low = draw(st.floats(0.01, 50))
    high = low + draw(st.floats(0.1, 5000))
    y = sorted(draw(st.tuples(st.floats(0, 0.98), st.floats(0.02, 1))))
    return Extent(low, high, y[0], max(y[1], y[0] + 0.01), draw(st.booleans()))


def drawn_at(x: np.ndarray, share: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The drawn step function, as matplotlib draws it."""
    place = np.searchsorted(x, points, side="right") - 1
    return np.where(place >= 0, share[np.maximum(place, 0)], 0.0)


@settings(max_examples=150, deadline=None)
@given(samples, extents(), st.integers(3, 64), st.integers(0, 20))
def test_curve_is_exact_but_for_one_bin(values: np.ndarray, extent: Extent, bins: int, tail: int) -> None:
    x, share = drawn_steps(values, extent, bins=bins, tail=tail)

    assert np.array_equal(share, (values[None, :] <= x[:, None]).mean(axis=1))
    edges = extent.edges(bins)
    # At the edges of all bins nothing is lost; inside, the drawn curve lies between the exact one at its
    # bin's start and the exact one at the place itself.
    points = np.concatenate([edges[:-1], (edges[1:] + edges[:-1]) / 2])
    starts = np.concatenate([edges[:-1], edges[:-1]])
    exact = (values[None, :] <= points[:, None]).mean(axis=1)
    before = (values[None, :] < starts[:, None]).mean(axis=1)
    drawn = drawn_at(x, share, points)
    assert (drawn <= exact + 1e-12).all()
    assert (drawn >= before - 1e-12).all()


@settings(max_examples=150, deadline=None)
@given(samples, extents(), st.integers(1, 40))
def test_no_tail_sample_is_lost(values: np.ndarray, extent: Extent, tail: int) -> None:
    x, _ = drawn_steps(values, extent, bins=4, tail=tail)

    shares = np.arange(1, values.size + 1) / values.size
    inside = (values >= extent.x_min) & (values <= extent.x_max) & (shares - 1 / values.size < extent.y_max)
    wanted = values[inside][-tail:]
    assert np.isin(wanted, x).all()
    if inside.any():
        assert values[inside].max() in x


def test_a_curve_that_leaves_the_window_goes_on_to_the_next_sample() -> None:
    x, share = drawn_steps(np.array([1.0, 2.0, 3.0, 90.0]), Extent(1.5, 10.0))
    assert x.tolist() == [1.0, 2.0, 3.0, 90.0]
    assert share.tolist() == [0.25, 0.5, 0.75, 1.0]


def test_millions_of_samples_become_thousands_of_corners_with_the_whole_tail() -> None:
    values = np.sort(np.random.default_rng(3).lognormal(2, 1, 500_000))
    x, share = drawn_steps(values, Extent(0.0, float(values[-1])))
    assert x.size < 10_000
    assert np.array_equal(x[-1000:], values[-1000:])
    assert share[-1] == 1.0


@pytest.mark.parametrize("log", [False, True])
def test_equal_values_make_one_step(log: bool) -> None:
    x, share = drawn_steps(np.full(1000, 7.0), Extent(1.0, 10.0, log=log))
    assert x.tolist() == [7.0]
    assert share.tolist() == [1.0]


def test_share_counts_values_at_the_point() -> None:
    assert share_at(np.array([1.0, 2.0, 2.0, 5.0]), np.array([0.5, 2.0, 9.0])).tolist() == [0.0, 0.75, 1.0]
