# SPDX-License-Identifier: Apache-2.0
"""Every shape of a `vllm bench serve` result, and what the tables must say about it."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from results import detailed, save, with_failures
from splitbench.errors import UserError
from splitbench.tables import numbers
from splitbench.tables.ingest import ingest_cell
from splitbench.tables.parts import read_lineage
from splitbench.tables.schema import CELLS, REQUESTS, TOKENS


def test_plain_result_keeps_every_number(tmp_path, ingest):
    result = detailed()
    got = ingest(save(tmp_path / "r.json", result))
    assert got.column("ttft_ms") == [t * 1e3 for t in result["ttfts"]]
    assert got.column("e2e_ms") == [t * 1e3 for t in result["latencies"]]
    assert got.column("second_token_ms") == [
        (t + g[0]) * 1e3 for t, g in zip(result["ttfts"], result["itls"], strict=True)
    ]
    assert got.column("start_s") == pytest.approx([0.3 * k for k in range(8)])
    assert got.column("itls") == [15] * 8
    assert got.column("e2e_derived") == [False] * 8
    flat = [g * 1e3 for gaps in result["itls"] for g in gaps]
    assert got.tokens["itl_ms"].to_pylist() == flat
    assert got.tokens["position"].to_pylist() == list(range(1, 16)) * 8
    assert got.tokens["request"].to_pylist() == sorted(list(range(8)) * 15)
    assert set(got.tokens["cell_id"].to_pylist()) == {"a/b/c4/1-1"}
    assert got.cell["requests_completed"] == 8
    assert got.cell["requests_failed"] == 0
    assert got.cell["output_tokens_total"] == 128
    assert got.cell["clock_origin_s"] == 1000.0


def test_derived_columns_follow_their_definitions(tmp_path, ingest):
    result = detailed(requests=3, tokens=40)
    got = ingest(save(tmp_path / "r.json", result))
    for k, (ttft, gaps, e2e) in enumerate(
        zip(result["ttfts"], result["itls"], result["latencies"], strict=True)
    ):
        row = got.requests.slice(k, 1).to_pylist()[0]
        assert row["tpot_ms"] == pytest.approx((e2e - ttft) / 39 * 1e3)
        assert row["itl_mean_ms"] == pytest.approx(np.mean(gaps) * 1e3)
        assert row["itl_p99_ms"] == pytest.approx(np.quantile(gaps, 0.99) * 1e3)
        assert row["itl_max_ms"] == max(gaps) * 1e3
        assert row["handoff_gap_ms"] is None


def test_handoff_gap_only_where_the_prefiller_sends_the_first_token(tmp_path, ingest):
    result = detailed()
    for gaps in result["itls"]:
        gaps[0] += 0.5
    raw = save(tmp_path / "r.json", result)
    got = ingest(raw, first_token="prefiller")
    expected = [(g[0] - np.median(g[1:])) * 1e3 for g in result["itls"]]
    assert got.column("handoff_gap_ms") == pytest.approx(expected)
    assert ingest(raw, first_token="decoder").column("handoff_gap_ms") == [None] * 8


def test_failed_requests_are_marked_and_give_no_latency(tmp_path, ingest):
    got = ingest(save(tmp_path / "r.json", with_failures(detailed(), 2, 5)))
    assert got.column("ok") == [True, True, False, True, True, False, True, True]
    for name in ("ttft_ms", "e2e_ms", "second_token_ms", "tpot_ms", "itl_max_ms"):
        column = got.column(name)
        assert column[2] is None and column[5] is None and None not in column[:2]
    assert got.column("error")[2] == "Traceback: ServerDisconnectedError"
    assert got.column("error")[0] is None
    assert got.tokens.num_rows == 6 * 15
    assert (got.cell["requests_completed"], got.cell["requests_failed"]) == (6, 2)


def test_failure_without_an_error_text_is_a_failure(tmp_path, ingest):
    result = with_failures(detailed(), 3)
    result["errors"][3] = ""
    got = ingest(save(tmp_path / "r.json", result))
    assert got.column("ok")[3] is False
    assert got.column("error")[3] == ""


def test_request_that_died_midway_keeps_its_gaps_but_apart(tmp_path, ingest):
    result = detailed()
    result["errors"][1] = "connection reset"
    result["itls"][1] = result["itls"][1][:4]
    got = ingest(save(tmp_path / "r.json", result))
    died = got.tokens.filter(pa.compute.equal(got.tokens["request"], 1))
    assert died["ok"].to_pylist() == [False] * 4
    assert got.column("e2e_ms")[1] is None
    assert got.column("ttft_ms")[1] == result["ttfts"][1] * 1e3


def test_all_failed_never_reads_as_zero(tmp_path, ingest):
    got = ingest(save(tmp_path / "r.json", with_failures(detailed(), *range(8))))
    assert got.column("ttft_ms") == [None] * 8
    assert got.tokens.num_rows == 0
    assert got.cell["requests_completed"] == 0


def test_one_token_answers_take_their_ttft(tmp_path, ingest):
    result = detailed(tokens=1)
    del result["latencies"]
    got = ingest(save(tmp_path / "r.json", result))
    assert got.column("e2e_ms") == got.column("ttft_ms")
    assert got.column("tpot_ms") == [None] * 8
    assert got.column("second_token_ms") == [None] * 8
    assert got.tokens.num_rows == 0


def test_older_keys(tmp_path, ingest):
    result = detailed()
    for key in ("failed", "latencies", "start_times", "request_goodput"):
        del result[key]
    result["request_goodput:"] = 0.25
    got = ingest(save(tmp_path / "r.json", result))
    assert dict(got.cell["client_summary"])["request_goodput"] == 0.25
    assert got.column("start_s") == [None] * 8
    assert got.cell["clock_origin_s"] is None
    sums = [t + sum(g) for t, g in zip(result["ttfts"], result["itls"], strict=True)]
    assert got.column("e2e_ms") == pytest.approx([s * 1e3 for s in sums])
    assert got.column("e2e_derived") == [True] * 8


def test_without_itls_and_latencies_nothing_is_invented(tmp_path, ingest):
    result = detailed()
    del result["itls"], result["latencies"]
    got = ingest(save(tmp_path / "r.json", result))
    assert got.column("e2e_ms") == [None] * 8
    assert got.column("itls") == [None] * 8
    assert got.tokens.num_rows == 0


def test_summary_only(tmp_path, ingest):
    per_request = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors")
    result = {k: v for k, v in detailed().items() if k not in (*per_request, "generated_texts")}
    result["p99_ttft_ms"] = 120.0
    got = ingest(save(tmp_path / "r.json", result))
    assert got.requests.num_rows == 0 and got.tokens.num_rows == 0
    assert got.cell["detailed"] is False
    assert got.cell["requests_completed"] == 8
    assert dict(got.cell["client_summary"])["p99_ttft_ms"] == 120.0


@pytest.mark.parametrize("rate", ["inf", math.inf, "Infinity"])
def test_infinite_rate_however_written(tmp_path, ingest, rate):
    result = detailed() | {"request_rate": rate, "mean_tpot_ms": math.nan}
    got = ingest(save(tmp_path / "r.json", result))
    assert got.cell["request_rate"] is None
    assert math.isnan(dict(got.cell["client_summary"])["mean_tpot_ms"])


def test_open_loop(tmp_path, ingest):
    got = ingest(save(tmp_path / "r.json", detailed() | {"request_rate": 4.0, "max_concurrency": None}))
    assert got.cell["request_rate"] == 4.0
    assert got.cell["concurrency"] is None


def test_nan_and_infinity_inside_the_arrays(tmp_path, ingest):
    result = detailed()
    result["itls"][2][3] = math.nan
    result["itls"][4][0] = math.inf
    result["ttfts"][5] = math.nan
    got = ingest(save(tmp_path / "r.json", result))
    gaps = got.tokens["itl_ms"].to_numpy()
    assert np.isnan(gaps[2 * 15 + 3]) and np.isinf(gaps[4 * 15])
    assert got.column("ttft_ms")[5] is None


def test_appended_results_are_addressed_one_by_one(tmp_path, ingest):
    raw = save(tmp_path / "r.json", detailed(seed=1), detailed(seed=2), detailed(seed=3))
    with pytest.raises(UserError, match=r"holds 3 results where one is expected.*record 1 to 3"):
        ingest(raw)
    second = ingest(raw, record=2)
    assert second.column("ttft_ms") == [t * 1e3 for t in detailed(seed=2)["ttfts"]]
    assert second.cell["source_name"] == "r.json#2"
    with pytest.raises(UserError, match="has no record 4"):
        ingest(raw, record=4)


@pytest.mark.parametrize("options", [{"indent": 2}, {"indent": 0}, {"separators": (",", ":")}])
def test_other_white_space(tmp_path, ingest, options):
    result = detailed()
    got = ingest(save(tmp_path / "r.json", result, **options))
    assert got.tokens["itl_ms"].to_pylist() == [g * 1e3 for gaps in result["itls"] for g in gaps]


def test_key_order_does_not_matter(tmp_path, ingest):
    result = detailed()
    turned = dict(reversed(list(result.items())))
    assert ingest(save(tmp_path / "t.json", turned)).requests.equals(
        ingest(save(tmp_path / "r.json", result)).requests
    )


def test_metadata_keys_are_kept(tmp_path, ingest):
    got = ingest(
        save(tmp_path / "r.json", detailed() | {"tag": "night run", "nested": {"a": [1]}, "ratio": 0.5})
    )
    other = dict(got.cell["client_other"])
    assert other["tag"] == "night run" and json.loads(other["nested"]) == {"a": [1]}
    assert dict(got.cell["client_summary"])["ratio"] == 0.5


def test_the_callers_identity_goes_before_the_file(tmp_path, ingest):
    got = ingest(save(tmp_path / "r.json", detailed()), layout="agg", requests_asked=16, burstiness=None)
    assert got.cell["layout"] == "agg"
    assert got.cell["requests_asked"] == 16
    assert got.cell["burstiness"] == 1.0


def test_lineage_is_in_every_file(tmp_path, ingest):
    raw = save(tmp_path / "r.json", detailed())
    got = ingest(raw, cell_digest="d" * 64, environment_digest="e" * 64, code_version="1.2.3")
    for path, table in zip(got.paths, (CELLS, REQUESTS, TOKENS), strict=True):
        lineage = read_lineage(path)
        assert lineage["splitbench.table"] == table.name
        assert lineage["splitbench.cell_digest"] == "d" * 64
        assert lineage["splitbench.environment_digest"] == "e" * 64
        assert lineage["splitbench.code_version"] == "1.2.3"
        assert lineage["splitbench.source_sha256"] == hashlib.sha256(raw.read_bytes()).hexdigest()
        assert pq.read_schema(path).remove_metadata().equals(table.schema)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "file is empty"),
        (" \n", "file is empty"),
        ("[]", "found an empty list"),
        ("[1]", "found a list"),
        ("{}", "no result of vllm bench serve"),
        ('{"a": 1}', "no result of vllm bench serve.*splitbench import"),
        ("nonsense", "byte 0: a result object is expected, found 'nonsense'"),
        ('{"ttfts": [1.0, "x"], "num_prompts": 2}', r"ttfts\[1\]: a number is expected, found text"),
        ('{"ttfts": {"a": 1}}', "ttfts: a list of numbers is expected, found an object"),
        ('{"itls": [[1], 2]}', "itls"),
        ('{"itls": [[1], [2, "x"]]}', "itls"),
        ('{"itls": [[1], [2, [3]]]}', "itls"),
        ('{"itls": [-9223372036854775809]}', "itls"),
        ('{"itls": [[1' + "0" * 400 + "]]}", "itls: a number is too large"),
        ('{"itls": [[1], "]]", [2]], "ttfts": [1, 2, 3]}', "itls"),
        ('{"itls": 3}', "itls: a list of lists of numbers is expected, found a number"),
        ('{"itls": [[0.1, 0.2,], [1]]}', "itls"),
        ('{"num_prompts" 1}', "byte 15: a colon after 'num_prompts'"),
        ('{"num_prompts": 1 "a": 2}', "byte 18: a comma or the end"),
        ('{"num_prompts": 1} trailing', "byte 19: a result object"),
        ('{"num_prompts": 1,', "ends early at byte 18"),
        ('{"num_prompts": tru}', "byte 16"),
        ('{"num_prompts": "abc', "ends early at byte 20, inside num_prompts"),
        ('{"x": {"a": [1, 2}', "byte 17"),
    ],
)
def test_what_is_no_result_gives_one_line(tmp_path, text, message):
    raw = tmp_path / "r.json"
    raw.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        ingest_cell(raw, {"cell_id": "x"}, tmp_path / "cell")
    assert "\n" not in str(caught.value) and str(raw) in str(caught.value)
    assert not any((tmp_path / "cell").glob("**/*")) if (tmp_path / "cell").exists() else True


def test_cut_anywhere_is_one_line_with_the_byte(tmp_path):
    whole = json.dumps(detailed(requests=3, tokens=4))
    raw = tmp_path / "r.json"
    for size in range(1, len(whole) - 1, 7):
        raw.write_text(whole[:size])
        with pytest.raises(UserError, match=f"byte {size}"):
            ingest_cell(raw, {"cell_id": "x"}, tmp_path / "cell")
    assert not list((tmp_path / "cell").glob("*.parquet"))


def test_ragged_arrays_are_named(tmp_path):
    result = detailed()
    del result["ttfts"][0]
    with pytest.raises(UserError, match=r"different length: ttfts \(7\) and itls \(8\)"):
        ingest_cell(save(tmp_path / "r.json", result), {"cell_id": "x"}, tmp_path / "cell")


def test_too_few_itl_lists_are_named_and_nothing_is_left(tmp_path):
    result = detailed()
    del result["itls"][0]
    with pytest.raises(UserError, match=r"itls \(7\)"):
        ingest_cell(save(tmp_path / "r.json", result), {"cell_id": "x"}, tmp_path / "cell")
    assert list((tmp_path / "cell").iterdir()) == []


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        ingest_cell(tmp_path / "none.json", {"cell_id": "x"}, tmp_path / "cell")


def test_a_file_of_another_load_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds a run at concurrency 4, the cell asks for 8"):
        ingest_cell(save(tmp_path / "r.json", detailed()), {"cell_id": "x", "concurrency": 8}, tmp_path / "c")


def test_wrong_identity(tmp_path):
    raw = save(tmp_path / "r.json", detailed())
    with pytest.raises(UserError, match="unknown key colour"):
        ingest_cell(raw, {"cell_id": "x", "colour": 1}, tmp_path / "c")
    with pytest.raises(UserError, match="no cell_id"):
        ingest_cell(raw, {"layout": "x"}, tmp_path / "c")
    with pytest.raises(UserError, match=r"cells\.budget"):
        ingest_cell(raw, {"cell_id": "x", "budget": "four"}, tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []


def test_an_old_result_stays_when_the_new_one_is_broken(tmp_path, ingest):
    before = ingest(save(tmp_path / "r.json", detailed())).paths.tokens.read_bytes()
    (tmp_path / "bad.json").write_text('{"itls": [[0.1], [0.2')
    with pytest.raises(UserError):
        ingest(tmp_path / "bad.json")
    assert (tmp_path / "cell" / "tokens.parquet").read_bytes() == before


def test_whole_numbers_beyond_64_bits(tmp_path, ingest):
    result = detailed()
    result["itls"][0][0] = 2**70
    assert ingest(save(tmp_path / "r.json", result)).tokens["itl_ms"].to_pylist()[0] == 2.0**70 * 1e3


def test_chunked_decoding_equals_whole(tmp_path, monkeypatch, ingest):
    result = detailed(requests=50, tokens=23)
    raw = save(tmp_path / "r.json", result)
    whole = ingest(raw).tokens
    monkeypatch.setattr(numbers.number_lists, "__defaults__", (100,))
    monkeypatch.setattr("splitbench.tables.cellwriter.ROWS_AT_ONCE", 64)
    assert ingest(raw).tokens.equals(whole)


def test_without_simdjson_the_tables_are_the_same(tmp_path, monkeypatch, ingest):
    result = with_failures(detailed(requests=30), 4)
    raw = save(tmp_path / "r.json", result)
    fast = ingest(raw)
    monkeypatch.setattr(numbers, "simdjson", None)
    slow = ingest(raw)
    assert slow.tokens.equals(fast.tokens) and slow.requests.equals(fast.requests)


def test_ingest_does_not_import_pandas(tmp_path):
    import subprocess
    import sys

    raw = save(tmp_path / "r.json", detailed())
    code = (
        "import sys; from pathlib import Path; from splitbench.tables.ingest import ingest_cell; "
        f"ingest_cell(Path({str(raw)!r}), {{'cell_id': 'x'}}, Path({str(tmp_path / 'c')!r})); "
        "sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_real_result_of_an_older_client(ingest):
    # vLLM 0.11.0 states neither start times nor latencies.
    path = Path(__file__).parents[2] / "fixtures" / "vllm" / "bench-0.11.0.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    got = ingest(path)
    assert got.column("ttft_ms") == [t * 1e3 for t in result["ttfts"]]
    assert got.column("start_s") == [None, None] and got.column("e2e_derived") == [True, True]
    assert got.column("e2e_ms") == pytest.approx(
        [1e3 * (t + sum(gaps)) for t, gaps in zip(result["ttfts"], result["itls"], strict=True)]
    )
    assert len(got.tokens) == 22 and got.cell["requests_completed"] == 2
