# SPDX-License-Identifier: Apache-2.0
"""A slice of `python -m tests.fuzz`, with a fixed seed; targets that need finished results are left to the campaign."""

from __future__ import annotations

import pytest

from tests.fuzz.running import TARGETS, run

SLICE = {
    "config-nearly-good": 8,
    "config-shaped": 5,
    "config-text": 15,
    "result-file": 25,
    "engine-log": 4,
    "server-info": 20,
    "metrics-page": 8,
    "probe-output": 15,
    "event-stream": 20,
}


@pytest.mark.parametrize("name", SLICE)
def test_bad_input_is_answered_in_one_line(name: str) -> None:
    run(name, examples=SLICE[name], seed=20260101)


def test_the_campaign_has_more() -> None:
    assert set(TARGETS) > set(SLICE)
