# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from figures_data import tables
from pydantic import ValidationError
from test_figures_cdf import clashes, texts

from splitbench.errors import UserError
from splitbench.figures.gallery import FigureSpec, Measured, draw
from splitbench.figures.tail import supported_share
from splitbench.statistics.clusters import clustered, clustered_quantile
from splitbench.statistics.quantiles import needed


def measured(**more: object) -> Measured:
    found = tables(**more)  # type: ignore[arg-type]
    return Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])


def spec(figure: str, **more: object) -> FigureSpec:
    return FigureSpec.model_validate({"figure": figure, "workload": "long", **more})


def test_points_are_the_percentiles_and_bars_their_intervals() -> None:
    m = measured(repeats=3)
    drawn = draw(m, spec("itl_against_concurrency", slo_ms=30))
    rows = drawn.data.set_index(["layout", "concurrency"])
    row = rows.loc[("agg-tp4", 32)]
    each = [m.values(f"agg-tp4-0a0a0a0a/long-0b0b0b0b/c32/{i}-0", "itl_ms")[0] for i in range(3)]
    assert row["value_ms"] == np.quantile(np.concatenate(each), 0.99)
    assert row["lowest_repeat_ms"] == min(np.quantile(part, 0.99) for part in each)
    assert row["highest_repeat_ms"] == max(np.quantile(part, 0.99) for part in each)
    values = np.concatenate(each)
    interval = clustered_quantile(
        clustered(values, np.repeat([0, 1, 2], 384 * 40), "restart", 1152), 0.99
    ).interval
    assert (row["low_ms"], row["high_ms"]) == (interval.low, interval.high)
    assert row["requests"] == 3 * 384
    assert np.isnan(rows.loc[("agg-tp4", 8), "low_ms"])  # 288 requests support no P99, so no interval either
    ax = drawn.figure.axes[0]
    assert [list(line.get_ydata()) for line in ax.lines].count([30, 30]) == 1
    assert "SLO 30 ms" in texts(drawn.figure)
    assert clashes(drawn) == []


def test_hollow_where_requests_lack() -> None:
    drawn = draw(measured(), spec("itl_against_concurrency", layouts=["agg-tp4"]))
    assert drawn.data["supported"].tolist() == [False, False, True]
    faces = [line.get_markerfacecolor() for line in drawn.figure.axes[0].lines if line.get_marker() == "^"]
    assert [face == "white" for face in faces] == [True, True, False]


def test_an_invalid_cell_is_a_cross_without_a_line() -> None:
    m = measured(invalid=(("pd-tp2", 32),))
    drawn = draw(m, spec("itl_against_concurrency", layouts=["agg-tp4", "pd-tp2"]))
    crosses = [
        line for line in drawn.figure.axes[0].lines if line.get_marker() == "x" and len(line.get_xdata())
    ]
    assert [list(line.get_xdata()) for line in crosses] == [[32]]
    joined = [line for line in drawn.figure.axes[0].lines if line.get_linestyle() != "None"]
    assert [list(line.get_xdata()) for line in joined if len(line.get_xdata())] == [[1, 8, 32], [1, 8]]
    assert "pd-tp2 at c=32 (completion)" in drawn.caption


def test_ttfts_of_different_content_give_way_to_the_second_token() -> None:
    drawn = draw(measured(), spec("ttft_against_concurrency", percentiles=[50]))
    assert set(drawn.data["metric"]) == {"second_token_ms"}
    assert "time to second token is shown" in drawn.caption
    same = draw(measured(first_token="decoder"), spec("ttft_against_concurrency", percentiles=[50]))
    assert set(same.data["metric"]) == {"ttft_ms"}


@pytest.mark.parametrize("p", [0.9, 0.99, 0.999])
def test_the_hatched_part_begins_where_the_sample_gate_ends(p: float) -> None:
    assert supported_share(needed(p)) <= 1 - p < supported_share(needed(p) - 1)


def one_cell(starts: list[float], ttfts: list[float], itls: list[list[float]]) -> Measured:
    """A cell of an aggregated layout with these requests."""
    found = tables(layouts=("agg-tp4",), loads=(8,))
    n = len(starts)
    cell = found["cells"]["cell_id"][0]
    requests = pd.DataFrame(
        {
            "cell_id": cell,
            "request": range(n),
            "ok": True,
            "start_s": starts,
            "ttft_ms": ttfts,
            "second_token_ms": [ttft + itl[0] for ttft, itl in zip(ttfts, itls, strict=True)],
            "e2e_ms": [ttft + sum(itl) for ttft, itl in zip(ttfts, itls, strict=True)],
        }
    )
    tokens = pd.DataFrame(
        [
            {"cell_id": cell, "request": i, "position": j + 1, "itl_ms": value, "ok": True}
            for i, itl in enumerate(itls)
            for j, value in enumerate(itl)
        ]
    )
    return Measured.from_frames(found["cells"], requests, tokens, found["checks"])


def test_a_token_lies_where_it_came_and_spikes_are_counted_beside_waits() -> None:
    # Request 1 waits from 0.2 to 0.5 s and stalls request 0 in that time; a later stall of 0 has no waiter.
    m = one_cell([0.0, 0.2], [100.0, 300.0], [[10.0] * 11 + [290.0, 10.0, 400.0], [10.0] * 4])
    drawn = draw(m, spec("interference", time_window_s=[0, 2]))
    tokens = drawn.data[drawn.data["what"].isin(["itl", "spike"]) & (drawn.data["request"] == 0)]
    expected = 0.1 + np.cumsum([10.0] * 11 + [290.0, 10.0, 400.0]) / 1000
    assert np.allclose(tokens["to_s"], expected)
    spikes = drawn.data[drawn.data["what"] == "spike"]
    assert spikes["itl_ms"].tolist() == [290.0, 400.0]
    assert "50 % of them while another request waited" in drawn.caption
    waits = drawn.data[drawn.data["what"] == "wait"]
    assert waits[["from_s", "to_s"]].to_numpy().tolist() == [[0.0, 0.1], [0.2, 0.5]]
    assert clashes(drawn) == []


def test_calm_cells_say_so() -> None:
    m = one_cell([0.0, 0.2], [100.0, 300.0], [[10.0] * 5, [11.0] * 5])
    assert "none of 10 ITLs is a spike" in draw(m, spec("interference")).caption


def test_the_timeline_takes_one_aggregated_and_one_pd_layout_and_valid_cells() -> None:
    drawn = draw(measured(invalid=(("agg-tp4", 32),)), spec("interference"))
    assert drawn.cells == ("agg-tp4-0a0a0a0a/long-0b0b0b0b/c8/0-0", "pd-tp2-0a0a0a0a/long-0b0b0b0b/c8/0-0")
    assert drawn.invalid == ()
    assert clashes(drawn) == []
    stacked = draw(measured(), spec("interference", width="column"))
    assert len(stacked.figure.axes) == 4
    assert clashes(stacked) == []


def test_without_start_times_the_timeline_says_so() -> None:
    found = tables()
    found["requests"]["start_s"] = np.nan
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    with pytest.raises(UserError, match="states no start times"):
        draw(m, spec("interference"))


def test_a_time_window_runs_forward() -> None:
    with pytest.raises(ValidationError, match="smaller to a larger time"):
        spec("interference", time_window_s=[3, 1])
