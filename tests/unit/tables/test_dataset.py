# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from results import detailed, save, with_failures
from splitbench.errors import UserError
from splitbench.statistics.bootstrap import paired_differences
from splitbench.statistics.clusters import clustered_quantile
from splitbench.statistics.quantiles import quantiles
from splitbench.tables import cli_import, cli_sql, dataset
from splitbench.tables.ingest import ingest_cell
from splitbench.tables.parts import read_lineage, write_part


@pytest.fixture
def parts(tmp_path):
    """Six cells: three server starts of two runs each; one request of the first failed midway."""
    made = []
    for restart in (1, 2, 3):
        for repeat in (1, 2):
            result = detailed(seed=10 * restart + repeat)
            if (restart, repeat) == (1, 1):
                result = with_failures(result, 2)
                result["errors"][3] = "reset"
            cell_id = f"agg-00000000/w-00000000/c4/{restart}-{repeat}"
            raw = save(tmp_path / f"{restart}{repeat}.json", result)
            cell = {"cell_id": cell_id, "layout": "agg", "restart": restart, "repeat": repeat}
            ingest_cell(raw, cell, tmp_path / "cells" / cell_id)
            made.append(tmp_path / "cells" / cell_id)
    return made


def test_parts_are_found_in_order(tmp_path, parts):
    assert dataset.find_parts(tmp_path) == sorted(parts)
    assert dataset.find_parts(tmp_path / "none") == []


def test_tables_read_as_one(parts):
    assert dataset.cells(parts)["restart"].to_pylist() == [1, 1, 2, 2, 3, 3]
    requests = dataset.requests(parts)
    assert requests.num_rows == 48 and requests["ok"].to_pylist().count(False) == 2
    assert dataset.requests(parts, ["ttft_ms"], pc.field("ttft_ms") > 0).column_names == ["ttft_ms"]


def test_itls_of_failed_requests_stay_out_unless_asked(parts):
    batches = list(dataset.tokens(parts))
    assert sum(b.num_rows for b in batches) == 46 * 15
    assert all(all(b.column("ok").to_pylist()) for b in batches)
    assert sum(b.num_rows for b in dataset.tokens(parts, failed=True)) == 47 * 15
    late = dataset.tokens(parts, ["position"], pc.field("position") > 12)
    assert {p for b in late for p in b.column(0).to_pylist()} == {13, 14, 15}
    assert len(dataset.itl_values(parts)) == 46 * 15
    assert len(dataset.request_values(parts, "ttft_ms")) == 46


def test_a_part_may_be_named_by_any_of_its_files(parts):
    by_file = [parts[0] / "requests.parquet", *parts[1:]]
    assert dataset.requests(by_file).equals(dataset.requests(parts))


def test_missing_files_are_named(parts):
    (parts[2] / "tokens.parquet").unlink()
    with pytest.raises(UserError, match=r"has no tokens\.parquet"):
        list(dataset.tokens(parts))
    with pytest.raises(UserError, match="no table 'token'"):
        dataset.open_table(parts, "token")


def test_optional_tables_are_empty_until_written(parts):
    assert dataset.open_table(parts, "checks").to_table().num_rows == 0
    rows = [{"check": "tokens", "outcome": "ok", "reason": None, "figures": {"share": 1.0}, "thresholds": {}}]
    path = write_part("checks", rows, parts[1], {"cell_id": "x", "cell_digest": "d"})
    found = dataset.open_table(parts, "checks").to_table().to_pylist()
    assert found == [{"cell_id": "x", **rows[0], "figures": [("share", 1.0)], "thresholds": []}]
    assert read_lineage(path)["splitbench.cell_digest"] == "d"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"check": "a", "outcome": "ok", "colour": 1}], "unknown column colour"),
        ([{"check": "a", "outcome": 3}], r"checks\.outcome"),
        ([{"check": "a"}], "column outcome has empty values"),
        ([{"check": "a", "outcome": "ok", "figures": {"x": "y"}}], r"checks\.figures"),
    ],
)
def test_rows_that_do_not_fit_give_one_line(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        write_part("checks", rows, tmp_path, {"cell_id": "x"})
    assert not list(tmp_path.iterdir())


def test_parts_of_an_older_schema_read_with_nulls(parts):
    path = parts[0] / "requests.parquet"
    old = pq.read_table(path).drop_columns(["handoff_gap_ms"])
    pq.write_table(old, path)
    assert dataset.requests(parts)["handoff_gap_ms"].null_count == 48


def test_streamed_quantiles_are_those_of_all_values(parts):
    values = dataset.itl_values(parts)
    np.testing.assert_array_equal(
        quantiles(dataset.itl_chunks(parts), [0.01, 0.5, 0.99]), np.quantile(values, [0.01, 0.5, 0.99])
    )


def test_units_are_the_highest_level_with_two(parts):
    by_restart = dataset.clustered_itls(parts)
    assert (by_restart.level, by_restart.units, by_restart.requests) == ("restart", 3, 46)
    by_run = dataset.clustered_itls(parts[:2])
    assert (by_run.level, by_run.units, by_run.requests) == ("run", 2, 14)
    by_request = dataset.clustered_itls(parts[:1])
    assert (by_request.level, by_request.units, by_request.requests) == ("request", 6, 6)
    for sample, some in ((by_restart, parts), (by_run, parts[:2]), (by_request, parts[:1])):
        reading = clustered_quantile(sample, 0.5)
        assert reading.value == np.quantile(dataset.itl_values(some), 0.5)
    ttft = dataset.clustered_requests(parts, "ttft_ms")
    assert (ttft.level, ttft.units, ttft.requests) == ("restart", 3, 46)


def test_two_layouts_pair_by_their_server_starts(parts):
    a = dataset.clustered_itls(parts)
    difference = paired_differences(a, a, [0.5])[0]
    assert difference.paired and difference.change == 0 and difference.units == 3
    assert difference.interval.low == difference.interval.high == 0


def test_sql(parts):
    answer = dataset.sql(parts, "select restart, count(*) n from cells group by restart order by 1")
    assert answer.to_pylist() == [{"restart": r, "n": 2} for r in (1, 2, 3)]
    joined = "select max(itl_ms) m from tokens join cells using (cell_id) where restart = 2 and tokens.ok"
    assert dataset.sql(parts, joined).to_pylist()[0]["m"] == dataset.itl_values(parts[2:4]).max()
    assert dataset.sql(parts, "select count(*) c from telemetry").to_pylist() == [{"c": 0}]
    assert dataset.sql(parts, "select cell_id from requests").schema.field(0).type == pa.string()
    with pytest.raises(UserError, match="cannot be answered") as caught:
        dataset.sql(parts, "select nothing from nowhere")
    assert "\n" not in str(caught.value)


def parsed(verb, *words):
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return parser.parse_args(words)


def test_the_sql_verb(tmp_path, parts, capsys):
    where = ["--results", str(tmp_path)]
    assert cli_sql.run(parsed(cli_sql, "select restart from cells order by 1", *where, "--rows", "2")) == 0
    assert capsys.readouterr().out.split() == ["restart", "1", "1", "...", "4", "more", "rows"]
    cli_sql.run(parsed(cli_sql, "select count(*) n from cells", *where, "--format", "csv"))
    assert capsys.readouterr().out == "n\n6\n"
    cli_sql.run(parsed(cli_sql, "select count(*) n from cells", *where, "--format", "json"))
    assert capsys.readouterr().out == '{"n":6}\n'
    with pytest.raises(UserError, match="no ingested cell"):
        cli_sql.run(parsed(cli_sql, "select 1", "--results", str(tmp_path / "none")))


def test_the_import_verb(tmp_path, capsys):
    good, bad = save(tmp_path / "good.json", detailed()), tmp_path / "bad.json"
    bad.write_text("{")
    into = ["--into", str(tmp_path / "cells"), "--layout", "theirs", "--kind", "pd", "--budget", "4"]
    assert cli_import.run(parsed(cli_import, str(bad), str(good), *into)) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{good}: theirs-") and "ends early" in err
    assert cli_import.run(parsed(cli_import, str(good), *into)) == 0
    [part] = dataset.find_parts(tmp_path / "cells")
    row = dataset.cells([part]).to_pylist()[0]
    assert (row["layout"], row["kind"], row["budget"], row["experiment"]) == ("theirs", "pd", 4, "imported")
