# SPDX-License-Identifier: Apache-2.0
"""Reasons that checks give have a Japanese form; what has no pattern stays as it is."""

from __future__ import annotations

import re
from typing import Any

import pytest
from made_up import bench, evidence, pd

from splitbench.measuring.checks import all_checks
from splitbench.report import japanese

ENGLISH = re.compile(r"[a-z]{2,} [a-z]{2,}")


@pytest.mark.parametrize(
    "seen",
    [
        evidence(),
        evidence(percentiles=(50, 99)),
        evidence(warmups=0),
        evidence(prompts=9, bench=bench(gap_s=0.0)),
        evidence(request_rate=100.0, concurrency=None),
        pd(512, 0),
        pd(0, 512),
    ],
)
def test_no_english_is_left_in_a_checks_reason(seen: Any) -> None:
    # The reason of `same-answers` is the fixture's own word.
    for check in (check for check in all_checks(seen) if check.name != "same-answers"):
        found = japanese.reason(check.reason)
        assert found != check.reason, check.reason
        assert ENGLISH.search(found) is None, found


def test_reasons_of_one_check_are_translated_one_by_one() -> None:
    found = japanese.reason("other processes used 40 % of a core; GPU 0: process 7 (x) is not ours")
    assert found == "ほかのプロセスがコアの 40 % を使った、GPU 0: process 7 (x) is not ours"
