# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from splitbench.measuring.progress import Load, clock, estimate_s, progress_line, remaining_s


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65.4, "1:05"), (3789, "1:03:09"), (-3, "0:00")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_nearest_cell_gives_the_rate() -> None:
    done = {
        Load("agg", "long", 4, 10): 50.0,
        Load("agg", "short", 4, 10): 10.0,
        Load("agg", "long", 8, 10): 20.0,
    }
    assert estimate_s(Load("pd", "long", 4, 20), done) == 100.0
    assert estimate_s(Load("agg", "long", 7, 20), done) == 40.0
    assert estimate_s(Load("agg", "other", 4, 20), done) is not None
    assert estimate_s(Load("agg", "long", 4, 20), {}) is None


def test_what_is_left_is_the_sum_or_unknown() -> None:
    todo = [Load("a", "w", 1, 10), Load("a", "w", 2, 30)]
    assert remaining_s(todo, {Load("b", "w", 1, 10): 5.0}) == 20.0
    assert remaining_s(todo, {}) is None
    assert remaining_s([], {}) == 0


def test_the_line_says_which_cell_of_how_many() -> None:
    line = progress_line(3, 16, Load("agg", "long", 4, 44), 83.0, 190.0)
    assert line == "cell 3/16: agg long c=4, 44 requests | 1:23 gone, about 3:10 left"
    assert "not known yet" in progress_line(1, 16, Load("agg", "long", 4, 44), 0.0, None)
