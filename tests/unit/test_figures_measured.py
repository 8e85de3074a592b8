# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from figures_data import tables

from splitbench.errors import UserError
from splitbench.figures.gallery import Measured
from splitbench.tables.parts import write_part


def measured(**more: object) -> Measured:
    found = tables(**more)  # type: ignore[arg-type]
    return Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])


def layout(m: Measured, name: str):  # type: ignore[no-untyped-def]
    return m.layouts("long", [name])[0]


def test_aggregated_comes_before_pd_and_small_before_large() -> None:
    assert [one.name for one in measured().layouts("long")] == ["agg-tp4", "agg-tp8", "pd-tp2", "pd-tp4"]
    assert [one.name for one in measured().layouts("long", ["pd-tp4", "agg-tp4"])] == ["pd-tp4", "agg-tp4"]
    assert layout(measured(), "agg-tp4").words == "agg-tp4 (aggregated, 4 GPUs)"


def test_how_accelerators_are_shared_is_named_but_not_another_budget() -> None:
    found = tables()
    found["cells"]["share"] = ["mps 50+50" if name == "pd-tp2" else None for name in found["cells"]["layout"]]
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    shared = layout(m, "pd-tp2")
    assert shared.words == "pd-tp2 (PD, 4 GPUs, mps 50+50)"
    assert shared.occupies == "4 GPUs, mps 50+50"
    assert shared.budget == layout(m, "agg-tp4").budget == "4 GPUs"
    assert layout(m, "agg-tp4").words == "agg-tp4 (aggregated, 4 GPUs)"


def test_failed_requests_give_no_latency() -> None:
    m = measured(invalid=(("pd-tp2", 8),))
    (sample,) = m.samples("long", layout(m, "pd-tp2"), 8, "itl_ms")
    assert sample.requests == 48
    assert sample.values.size == 48 * 40
    (sample,) = m.samples("long", layout(m, "pd-tp2"), 8, "ttft_ms")
    assert sample.values.size == 48


def test_repeats_are_pooled_and_invalid_cells_kept_apart() -> None:
    found = tables(repeats=3)
    bad = found["cells"]["cell_id"] == "agg-tp4-0a0a0a0a/long-0b0b0b0b/c8/1-0"
    found["cells"].loc[bad, "verdict"] = "invalid"
    found["checks"].loc[found["checks"]["cell_id"].str.endswith("c8/1-0"), "outcome"] = "invalid"
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])

    valid, invalid = m.samples("long", layout(m, "agg-tp4"), 8, "itl_ms")
    assert [len(valid.parts), len(invalid.parts)] == [2, 1]
    assert valid.valid and not invalid.valid
    assert invalid.reasons == ("completion",)
    assert np.array_equal(valid.values, np.sort(np.concatenate(valid.parts)))


def test_an_invalid_cell_without_checks_still_says_so() -> None:
    found = tables(invalid=(("agg-tp4", 8),))
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"])
    assert m.samples("long", layout(m, "agg-tp4"), 8, "ttft_ms")[0].reasons == ("a check failed",)


def test_units_are_server_starts_then_runs_then_requests() -> None:
    found = tables(layouts=("agg-tp4",), loads=(8,), repeats=3)
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    ids = m.cells["cell_id"].tolist()
    starts = m.units(ids, "itl_ms")
    assert (starts.level, starts.units, starts.requests) == ("restart", 3, 288)
    m.cells["restart"] = 0
    runs = m.units(ids, "ttft_ms")
    assert (runs.level, runs.units, runs.requests) == ("run", 3, 288)
    requests = m.units(ids[:1], "itl_ms")
    assert (requests.level, requests.units, requests.requests) == ("request", 96, 96)
    ((values, labels),) = requests.values()
    rows = found["tokens"][found["tokens"]["cell_id"] == ids[0]]
    for number in (0, 95):
        mine = rows[rows["request"] == number]["itl_ms"]
        assert sorted(values[labels == number]) == sorted(mine)


def test_checks_give_the_verdict_that_a_cells_row_lacks() -> None:
    found = tables(invalid=(("agg-tp4", 8),))
    found["cells"]["verdict"] = None
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    verdicts = m.cells.set_index("cell_id")["verdict"]
    assert verdicts["agg-tp4-0a0a0a0a/long-0b0b0b0b/c8/0-0"] == "invalid"
    assert (verdicts == "ok").sum() == 11
    assert not m.samples("long", layout(m, "agg-tp4"), 8, "itl_ms")[0].valid


def test_a_cell_with_totals_only_is_no_result() -> None:
    found = tables()
    m = Measured.from_frames(found["cells"], found["requests"].iloc[:0], found["tokens"].iloc[:0])
    (sample,) = m.samples("long", layout(m, "agg-tp4"), 8, "ttft_ms")
    assert not sample.valid
    assert sample.reasons == ("no latencies in the file",)


def test_token_rows_need_no_order() -> None:
    found = tables()
    shuffled = found["tokens"].sample(frac=1, random_state=1)
    a = Measured.from_frames(found["cells"], found["requests"], found["tokens"])
    b = Measured.from_frames(found["cells"], found["requests"], shuffled)
    for cell in found["cells"]["cell_id"]:
        assert np.array_equal(a.values(cell, "itl_ms")[0], b.values(cell, "itl_ms")[0])


def test_parts_on_disk_read_the_same(tmp_path: Path) -> None:
    found = tables(invalid=(("pd-tp4", 32),))
    folders = []
    for cell in found["cells"].to_dict("records"):
        folder = tmp_path / cell["cell_id"]
        folders.append(folder)
        facts = {key: value for key, value in cell.items() if value is not None and value == value}
        write_part("cells", [facts], folder, facts)
        for name in ("requests", "tokens", "checks"):
            rows = found[name][found[name]["cell_id"] == cell["cell_id"]]
            listed = [
                {key: value for key, value in row.items() if value == value}
                for row in rows.to_dict("records")
            ]
            write_part(name, listed, folder, facts)
    a = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    b = Measured.from_folders(folders)
    assert a.cells["cell_id"].tolist() == b.cells["cell_id"].tolist()
    for cell in a.cells["cell_id"]:
        for metric in ("itl_ms", "ttft_ms", "second_token_ms"):
            left, right = a.values(cell, metric), b.values(cell, metric)  # type: ignore[arg-type]
            assert np.array_equal(left[0], right[0])
            assert left[1] == right[1]
        assert a.reasons(cell) == b.reasons(cell)


@pytest.mark.parametrize(
    ("workload", "names", "says"),
    [("short", [], "no cell of workload 'short'"), ("long", ["tp9"], "no cell of layout tp9")],
)
def test_unknown_names_say_what_there_is(workload: str, names: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        measured().layouts(workload, names)
    assert "\n" not in str(error.value)
    assert "long" in str(error.value) or "agg-tp4" in str(error.value)


def test_a_missing_part_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no cell\.parquet"):
        Measured.from_folders([tmp_path])
