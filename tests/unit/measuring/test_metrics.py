# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitbench.measuring.metrics import growth, labels_of, parse_metrics, total

PAGE = """# HELP vllm:x_total help
# TYPE vllm:x_total counter
vllm:x_total{engine="0",source="a b"} 3.0
vllm:x_total{engine="1",source="c}d"} 4.5 1700000000
plain 7
vllm:bad NaN
vllm:inf +Inf
garbage
"""


def test_reads_series_with_labels_and_leaves_out_the_rest() -> None:
    values = parse_metrics(PAGE)
    assert values == {
        'vllm:x_total{engine="0",source="a b"}': 3.0,
        'vllm:x_total{engine="1",source="c}d"}': 4.5,
        "plain": 7.0,
    }


def test_sums_over_matching_series() -> None:
    values = parse_metrics(PAGE)
    assert total(values, "vllm:x_total") == 7.5
    assert total(values, "vllm:x_total", source="a b") == 3.0
    assert total(values, "vllm:x_total", source="z") is None
    assert total(values, "vllm:x") is None


def test_growth_counts_a_new_series_from_zero() -> None:
    after = parse_metrics(PAGE)
    assert growth({}, after, "plain") == 7.0
    assert growth({"plain": 5.0}, after, "plain") == 2.0
    assert growth({"plain": 5.0}, {}, "plain") is None


def test_labels() -> None:
    assert labels_of('m{a="1",b="x\\"y"}') == {"a": "1", "b": 'x\\"y'}


@given(st.text())
def test_any_page_is_read_without_an_error(page: str) -> None:
    parse_metrics(page)
