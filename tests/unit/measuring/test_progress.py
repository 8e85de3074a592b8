# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from splitbench.measuring.progress import Live, Load, Standing, clock, estimate_s, remaining_s


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


HERE = Load("agg", "long", 4, 44)


def standing(**changes: object) -> Standing:
    values = {"position": 3, "total": 16, "load": HERE, "repeat": "", "elapsed_s": 83.0}
    return Standing(**(values | changes))  # type: ignore[arg-type]


def test_the_line_says_which_cell_of_how_many() -> None:
    later, done = [Load("pd", "long", 4, 22)], {Load("pd", "long", 4, 44): 100.0}
    line = standing(later=later, done=done).line()
    assert line == "cell 3/16: agg long c=4, 44 requests | 1:23 gone, about 2:30 left"
    assert "not known yet" in standing(position=1, elapsed_s=0.0).line()
    assert "c=4 restart 2 repeat 1, 44" in standing(repeat="restart 2 repeat 1").line()


def test_while_it_runs_the_line_has_the_latest_latencies_and_counts_down() -> None:
    later, done = [Load("pd", "long", 4, 22)], {Load("pd", "long", 4, 44): 100.0}
    now = standing(later=later, done=done)
    live = Live(done=12, of=40, ttft_ms=523.4, itl_ms=4.26)
    line = now.line(25.0, live)
    assert line == (
        "cell 3/16: agg long c=4 | 12/40 requests, TTFT 523 ms, ITL 4.3 ms | 1:48 gone, about 2:05 left"
    )
    short = now.short_line(25.0, live)
    assert short == "3/16, 2:05 left | agg long c=4 | 12/40, TTFT 523 ms, ITL 4.3 ms"
    assert standing().short_line(1.0, live).startswith("3/16, ? left | ")
    assert "2 FAILED" in now.line(1.0, Live(done=3, of=40, failed=2))
    assert "TTFT" not in now.line(1.0, Live(done=0, of=40))


def test_how_far_the_first_cell_is_tells_what_is_left_when_nothing_else_does() -> None:
    first = standing(position=1, later=[Load("agg", "long", 8, 88)])
    assert first.left_s(10.0) is None
    assert first.left_s(10.0, whole_s=40.0) == 30.0 + 80.0
    assert first.left_s(50.0, whole_s=40.0) == 80.0  # late, but never less than nothing
