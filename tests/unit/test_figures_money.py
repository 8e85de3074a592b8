# SPDX-License-Identifier: Apache-2.0
"""Goodput, cost, throughput against interactivity, variance, break-even, telemetry."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figures_data import LAYOUTS, tables, watched

from splitbench.errors import UserError
from splitbench.figures.gallery import Drawn, FigureSpec, Measured, draw, draw_again, lineage, write_figure
from splitbench.files import canonical_json, digest
from splitbench.statistics.variance import variance_split

NEW: dict[str, dict[str, Any]] = {
    "goodput": {"limits": {"itl_ms": 30}},
    "cost": {"limits": {"itl_ms": 30}, "price_per_hour": 4.0, "currency": "USD"},
    "throughput_interactivity": {},
    "variance_split": {},
    "break_even": {"margin_percent": 5.0},
    "telemetry": {},
}


def measured(**more: Any) -> Measured:
    found = tables(**{"repeats": 3, "invalid": (("pd-tp2", 8),), **more})
    return Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"], watched)


def drawn(figure: str, m: Measured | None = None, **more: Any) -> Drawn:
    spec = FigureSpec.model_validate({"figure": figure, "workload": "long", **NEW[figure], **more})
    return draw(m or measured(), spec)


def test_goodput_counts_requests_within_the_limits_per_accelerator_and_second() -> None:
    m = measured()
    data = drawn("goodput", m).data.set_index(["layout", "concurrency"])
    row = data.loc["agg-tp8", 8]
    cells = m.cells[(m.cells["layout"] == "agg-tp8") & (m.cells["concurrency"] == 8)]
    rates = []
    for cell in cells.to_dict("records"):
        met = (m.requests(cell["cell_id"])["itl_p99_ms"] <= 30).sum()
        rates.append(met / cell["duration_s"] / 8)
    assert row["value"] == pytest.approx(np.mean(rates))
    assert row["low"] < row["value"] < row["high"]
    assert row["met"] < row["asked"]
    assert not data.loc["pd-tp2", 8]["valid"]
    # Without limits every answered request counts.
    free = drawn("goodput", m, limits=None).data.set_index(["layout", "concurrency"]).loc["agg-tp8", 8]
    assert free["met"] == free["asked"] == free["requests"]


def test_cost_is_price_over_the_tokens_that_count() -> None:
    m = measured()
    row = drawn("cost", m).data.set_index(["layout", "concurrency"]).loc["pd-tp4", 8]
    cells = m.cells[(m.cells["layout"] == "pd-tp4") & (m.cells["concurrency"] == 8)].to_dict("records")
    rates = []
    for cell in cells:
        requests = m.requests(cell["cell_id"])
        rates.append(requests.loc[requests["itl_p99_ms"] <= 30, "output_tokens"].sum() / cell["duration_s"])
    assert row["value"] == pytest.approx(8 * 4.0 / 3600 / np.mean(rates) * 1e6)
    hours = drawn("cost", m, price_per_hour=None, currency=None).data
    assert hours.set_index(["layout", "concurrency"]).loc["pd-tp4", 8]["value"] == pytest.approx(
        row["value"] / 4
    )
    nothing = drawn("cost", m, limits={"itl_ms": 0.1})
    assert np.isinf(nothing.data.loc[nothing.data["valid"], "value"]).all()
    assert "no finite cost" in nothing.caption


def test_one_run_has_no_interval() -> None:
    data = drawn("goodput", measured(repeats=1)).data
    assert data["low"].isna().all() and data["high"].isna().all()
    assert not data["supported"].any()


def test_the_front_holds_what_nothing_beats() -> None:
    m = measured()
    data = drawn("throughput_interactivity", m).data
    values, _ = m.values("agg-tp4-0a0a0a0a/long-0b0b0b0b/c32/0-0", "itl_ms")
    assert values.size
    valid = data[data["valid"]]
    for row in valid.to_dict("records"):
        better = valid[(valid["user_tokens_s"] > row["user_tokens_s"]) & (valid["value"] > row["value"])]
        assert row["front"] == better.empty
    assert not data[~data["valid"]]["front"].any()


def test_rates_without_durations_are_refused() -> None:
    found = tables()
    m = Measured.from_frames(
        found["cells"].drop(columns="duration_s"), found["requests"], found["tokens"], found["checks"]
    )
    with pytest.raises(UserError, match="no durations"):
        drawn("goodput", m)


def test_variance_shares_are_those_of_the_analysis() -> None:
    m = measured()
    data = drawn("variance_split", m).data
    mine = data[(data["layout"] == "agg-tp4") & (data["metric"] == "ttft_ms")].set_index("part")
    cells = [f"agg-tp4-0a0a0a0a/long-0b0b0b0b/c32/{k}-0" for k in range(3)]
    parts = [m.values(cell, "ttft_ms")[0] for cell in cells]
    labels = np.repeat(np.arange(3), [part.size for part in parts])
    split = variance_split(np.concatenate(parts), labels, labels)
    assert mine.loc["request", "share"] == split.shares["request"]
    assert math.isnan(mine.loc["run", "share"])  # one run per start
    assert mine["share"].sum() == pytest.approx(1)


def test_break_even_lines_hold_the_changes() -> None:
    m = measured(loads=(1, 8, 32))
    found = drawn("break_even", m)
    data = found.data
    assert set(zip(data["layout"], data["reference"], strict=True)) == {
        ("pd-tp2", "agg-tp4"),
        ("pd-tp4", "agg-tp8"),
    }
    # The first token comes from the prefiller in PD only: the second token is compared.
    assert set(data["metric"]) == {"itl_ms", "second_token_ms"}
    row = data[(data["layout"] == "pd-tp4") & (data["metric"] == "itl_ms") & (data["concurrency"] == 32)]
    values = [
        np.quantile(
            np.concatenate(
                [m.values(f"{name}-0a0a0a0a/long-0b0b0b0b/c32/{k}-0", "itl_ms")[0] for k in range(3)]
            ),
            0.99,
        )
        for name in ("agg-tp8", "pd-tp4")
    ]
    assert row["change"].item() == pytest.approx(values[1] / values[0] - 1)
    assert 8 not in data.loc[data["layout"] == "pd-tp2", "concurrency"].tolist()  # invalid there
    assert "PD is better at every measured load" in found.caption
    with pytest.raises(UserError, match="leave this figure out"):
        drawn("break_even", measured(layouts=("agg-tp4", "pd-tp4")))


def test_telemetry_shows_what_moves_first_and_needs_something_to_show() -> None:
    found = drawn("telemetry")
    assert list(dict.fromkeys(found.data["layout"])) == ["agg-tp4", "pd-tp2"]
    titles = [ax.get_title("left") or ax.get_title() for ax in found.figure.axes]
    assert titles[0].endswith("running_requests") and titles[-1].endswith("still")


@pytest.mark.parametrize(
    ("figure", "why"),
    [
        ("telemetry", "Nothing was watched"),
        ("break_even", "No load of workload long has valid cells of both layouts of a pair"),
        ("variance_split", "No valid latencies of single requests at c=8"),
    ],
)
def test_nothing_to_draw_is_said_and_fails_no_run(figure: str, why: str) -> None:
    bad = tuple((layout, load) for layout in LAYOUTS for load in (1, 8))
    found = tables(loads=(1, 8), invalid=bad)
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    empty = drawn(figure, m)
    assert empty.caption.startswith(why)
    assert empty.data["what"].tolist() == ["nothing"]
    assert set(empty.invalid) <= set(empty.cells)


@pytest.mark.parametrize("figure", NEW)
def test_drawn_again_from_the_sidecar_the_data_are_the_same(figure: str) -> None:
    m = measured(loads=(1, 8))
    one = drawn(figure, m)
    sidecar = json.loads(canonical_json(lineage(one, m, experiment="trial")))
    again = draw_again(m, sidecar)
    assert again.data.to_csv(index=False) == one.data.to_csv(index=False)
    assert again.caption == one.caption


def test_the_files_on_disk_are_the_same_data(tmp_path: Path) -> None:
    m = measured(loads=(1, 8))
    one = drawn("break_even", m)
    sidecar = write_figure(one, tmp_path / "x", lineage(one, m, experiment="trial"))
    again = draw_again(m, json.loads((tmp_path / "x.json").read_text()))
    text = again.data.to_csv(index=False, lineterminator="\n")
    assert text == (tmp_path / "x.csv").read_text()
    assert digest(text) == sidecar["data_sha256"]
