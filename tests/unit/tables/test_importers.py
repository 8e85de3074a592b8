# SPDX-License-Identifier: Apache-2.0
"""Files as other tools write them (made up, with their keys and units), and what the tables must say."""

from __future__ import annotations

import json
import random

import pyarrow.parquet as pq
import pytest

from results import detailed, save, with_failures
from splitbench.errors import UserError
from splitbench.tables.importers import import_file

EPOCH_NS = 1_759_813_207_532_900_363


def aiperf_record(k, **changes):
    start = EPOCH_NS + k * 10_000_001
    record = {
        "metadata": {
            "session_num": k,
            "request_start_ns": start,
            "request_ack_ns": start + 5,
            "benchmark_phase": "profiling",
            "was_cancelled": False,
        },
        "metrics": {
            "input_sequence_length": {"value": 550, "unit": "tokens"},
            "time_to_first_token": {"value": 255.5 + k, "unit": "ms"},
            "request_latency": {"value": 0.2975, "unit": "sec"},
            "inter_chunk_latency": {"value": [4.5, 5.25, 4.75], "unit": "ms"},
            "inter_token_latency": {"value": 4.8333, "unit": "ms"},
            "output_sequence_length": {"value": 4, "unit": "tokens"},
        },
        "error": None,
    }
    return record | changes


def genai_export(mode="concurrency", value=8):
    def chunk(text):
        delta = {"content": text} if text is not None else {"role": "assistant"}
        return {"response": "data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}) + "\n\n"}

    outputs = [chunk(None), chunk("I"), chunk(" like"), chunk(" dogs"), {"response": "data: [DONE]\n\n"}]
    times = [EPOCH_NS + ms * 1_000_000 for ms in (1, 40, 52, 65, 66)]
    requests = [
        {"timestamp": EPOCH_NS, "response_timestamps": times, "response_outputs": outputs},
        {"timestamp": EPOCH_NS + 10**9, "response_timestamps": [], "response_outputs": []},
    ]
    experiment = {"experiment": {"mode": mode, "value": value}, "requests": requests}
    return {"service_kind": "openai", "endpoint": "v1/chat/completions", "experiments": [experiment]}


def guidellm_report(old=False):
    def request(start, failed=None):
        timings = {"request_start": start, "request_end": start + 0.5, "first_token_iteration": start + 0.1}
        record = {
            "request_latency": 0.5,
            "prompt_tokens": 64,
            "output_tokens": 16,
            "time_to_first_token_ms": 100.0,
            "inter_token_latency_ms": 26.0,
        }
        if old:
            record |= {"start_time": start, "end_time": start + 0.5, "first_token_time": start + 0.1}
            return record | ({"error": failed} if failed else {})
        info = {"timings": timings | {"queued": start - 0.2, "dequeued": start - 0.15}, "error": failed}
        return record | {"request_start_time": start, "request_end_time": start + 0.5, "info": info}

    strategy = {"type_": "concurrent", "streams": 16}
    benchmark = {
        "start_time": 1_759_354_691.0,
        "end_time": 1_759_354_701.0,
        "duration": 10.0,
        "metrics": {"request_latency": {"successful": {"mean": 0.5, "percentiles": {"p99": 0.6}}}},
        "requests": {
            "successful": [request(1_759_354_692.0), request(1_759_354_691.5)],
            "incomplete": [request(1_759_354_700.9)],
            "errored": [request(1_759_354_693.0, "boom")],
        },
        ("args" if old else "config"): {"strategy": strategy},
    }
    return {"args": {}, "benchmarks": [benchmark]}


def inference_perf_records(nested=False):
    def info(start):
        times = [start + 0.1, start + 0.112, start + 0.13]
        if nested:
            answer = {"output_tokens": 3, "output_token_times": times, "chunk_times": times}
            return {"request_metrics": {"text": {"input_tokens": 7}}, "response_metrics": answer}
        return {"input_tokens": 7, "output_tokens": 3, "output_token_times": times}

    records = [
        {
            "start_time": s,
            "end_time": s + 0.14,
            "request": "{}",
            "response": "",
            "info": info(s),
            "error": None,
        }
        for s in (1393.5, 1393.25)
    ]
    records.append(
        {
            "start_time": 1394.0,
            "end_time": 1399.0,
            "info": {"input_tokens": 7, "output_tokens": 0, "output_token_times": []},
            "error": {"error_type": "TimeoutError", "error_msg": "late"},
        }
    )
    for k, record in enumerate(records):
        if nested:
            record["stage_id"] = 0 if k < 2 else 1
    return records


AGGREGATE = {
    "hw": "h200",
    "conc": 64,
    "model": "m",
    "framework": "vllm",
    "disagg": True,
    "isl": 8192,
    "osl": 1024,
    "num_prefill_gpu": 2,
    "num_decode_gpu": 6,
    "tput_per_gpu": 100.5,
    "output_tput_per_gpu": 50.25,
    "p99_ttft": 0.75,
    "mean_tpot": 0.012,
}
HUGGING_FACE = {
    "config": {"max_vus": 128},
    "start_time": "2026-01-01T00:00:00+00:00",
    "end_time": "2026-01-01T00:05:00+00:00",
    "system": {},
    "results": [
        {"id": "warmup", "config": {"max_vus": 1, "rate": None}, "total_requests": 3},
        {
            "id": "constant@4.00req/s",
            "executor_type": "ConstantArrivalRate",
            "config": {"max_vus": 128, "duration_secs": 30, "rate": 4.0},
            "total_requests": 120,
            "successful_requests": 118,
            "failed_requests": 2,
            "total_tokens": 12_000,
            "total_tokens_sent": 24_000,
            "duration_ms": 30_500,
            "time_to_first_token_ms_p90": 81.5,
        },
        {
            "id": "throughput",
            "executor_type": "ConstantVUs",
            "config": {"max_vus": 128, "duration_secs": 30, "rate": None},
            "successful_requests": 500,
        },
    ],
}


@pytest.fixture
def imported(tmp_path):
    """Write a file, import it, and give (cell row, request rows, token rows) per cell."""

    def run(content, name="r.json", lines=False, **identity):
        path = tmp_path / name
        path.write_text("".join(json.dumps(c) + "\n" for c in content) if lines else json.dumps(content))
        cells = import_file(path, tmp_path / "cells", identity)
        return [tuple(pq.read_table(p).to_pylist() for p in paths) for _, paths in cells]

    return run


def test_aiperf_records(imported):
    failed = aiperf_record(2, metrics={"error_isl": {"value": 9, "unit": "tokens"}})
    failed["error"] = {"code": 499, "type": "RequestCancellationError", "message": "cancelled after 1 s"}
    warm = aiperf_record(9)
    warm["metadata"]["benchmark_phase"] = "warmup"
    [([cell], requests, tokens)] = imported(
        [aiperf_record(1), aiperf_record(0), warm, failed], "profile_export.jsonl", lines=True, concurrency=4
    )
    assert cell["client"] == "aiperf" and cell["concurrency"] == 4 and cell["started_at"].year == 2025
    assert (cell["requests_completed"], cell["requests_failed"]) == (2, 1)
    assert [r["start_s"] for r in requests] == [0.0, 0.010000001, 0.020000002]  # ns are not lost
    first, _, broken = requests
    assert first["ttft_ms"] == 255.5 and first["e2e_ms"] == pytest.approx(297.5)
    assert first["second_token_ms"] == pytest.approx(260.0)
    assert first["input_tokens"] == 550 and first["output_tokens"] == 4
    assert broken["ok"] is False and broken["error"] == "cancelled after 1 s" and broken["ttft_ms"] is None
    assert broken["input_tokens"] == 9 and broken["output_tokens"] is None
    assert [t["itl_ms"] for t in tokens] == pytest.approx([4.5, 5.25, 4.75] * 2)


def test_aiperf_without_streaming_has_no_token_times(imported):
    record = aiperf_record(0)
    for key in ("inter_chunk_latency", "time_to_first_token"):
        del record["metrics"][key]
    [(_, [request], tokens)] = imported([record], "profile_export.jsonl", lines=True)
    assert request["ttft_ms"] is None and request["second_token_ms"] is None and not tokens
    assert request["itl_mean_ms"] == pytest.approx(4.8333)


@pytest.mark.parametrize("ours", [True, False])
def test_nvidia_summaries(imported, ours):
    content = {
        "request_latency": {"unit": "ms", "avg": 2620.71, "p99": 3371.24, "count": 20},
        "request_throughput": {"unit": "requests/sec", "avg": 1.45},
        "request_count": {"unit": "requests", "avg": 20.0},
        "input_config": {"loadgen": {"concurrency": 10}, "endpoint": {"urls": ["x"]}},
    }
    if ours:
        content |= {"schema_version": "1.5", "aiperf_version": "0.14.0"}
    [([cell], requests, _)] = imported(content, "summary.json")
    assert cell["client"] == ("aiperf" if ours else "genai-perf")
    assert cell["client_version"] == ("0.14.0" if ours else None)
    assert cell["concurrency"] == 10 and cell["requests_completed"] == 20 and cell["detailed"] is False
    assert cell["requests_failed"] is None and not requests
    assert dict(cell["client_summary"])["request_latency.p99.ms"] == 3371.24


def test_genai_perf_counts_only_chunks_with_text(imported):
    [([cell], requests, tokens)] = imported(genai_export())
    assert cell["client"] == "genai-perf" and cell["concurrency"] == 8
    good, bad = requests
    assert good["ttft_ms"] == pytest.approx(40) and good["e2e_ms"] == pytest.approx(65)
    assert good["output_tokens"] is None and good["tpot_ms"] is None
    assert [t["itl_ms"] for t in tokens] == pytest.approx([12, 13])
    assert bad["ok"] is False
    [([by_rate], _, _)] = imported(genai_export("request_rate", 2.0))
    assert by_rate["concurrency"] is None and by_rate["request_rate"] == 2.0


@pytest.mark.parametrize("old", [True, False])
def test_guidellm(imported, old):
    [([cell], requests, tokens)] = imported(guidellm_report(old), "benchmarks.json")
    assert cell["client"] == "guidellm" and cell["concurrency"] == 16 and cell["duration_s"] == 10.0
    assert (cell["requests_completed"], cell["requests_failed"]) == (2, 2)
    assert [r["start_s"] for r in requests] == pytest.approx([0, 0.5, 1.5, 9.4])
    assert requests[0]["ttft_ms"] == 100.0 and requests[0]["e2e_ms"] == 500.0
    assert requests[0]["tpot_ms"] == pytest.approx(400 / 15)
    assert requests[0]["itl_mean_ms"] == pytest.approx(26.0)
    assert requests[0]["itl_p99_ms"] is None and requests[0]["second_token_ms"] is None and not tokens
    assert requests[0]["queue_ms"] == (None if old else pytest.approx(50, rel=1e-3))
    assert [r["error"] for r in requests] == [None, None, "boom", "incomplete"]
    assert dict(cell["client_summary"])["request_latency.successful.percentiles.p99"] == 0.6


@pytest.mark.parametrize("nested", [True, False])
def test_inference_perf_requests(imported, nested):
    cells = imported(inference_perf_records(nested), "per_request_lifecycle_metrics.json")
    assert len(cells) == (2 if nested else 1)
    [cell], requests, tokens = cells[0]
    assert cell["client"] == "inference-perf"
    assert requests[0]["ttft_ms"] == pytest.approx(100) and requests[0]["e2e_ms"] == pytest.approx(140)
    assert requests[0]["input_tokens"] == 7 and requests[0]["output_tokens"] == 3
    assert requests[1]["start_s"] == pytest.approx(0.25)
    assert [t["itl_ms"] for t in tokens] == pytest.approx([12, 18] * 2)
    late = cells[-1][1][-1]
    assert late["ok"] is False and late["error"] == "late" and late["e2e_ms"] is None


def test_inference_perf_summary(imported):
    content = {
        "load_summary": {"count": 60, "requested_rate": 1.0, "achieved_rate": 1.003},
        "successes": {"count": 59, "latency": {"time_to_first_token": {"median": 0.0546}}},
        "failures": {"count": 1, "request_latency": None},
    }
    [([cell], requests, _)] = imported(content, "stage_0_lifecycle_metrics.json")
    assert (cell["requests_asked"], cell["requests_completed"], cell["requests_failed"]) == (60, 59, 1)
    assert cell["request_rate"] == 1.0 and not requests
    assert dict(cell["client_summary"])["successes.latency.time_to_first_token.median"] == 0.0546


def test_inferencex_aggregates(imported):
    [([cell], requests, _)] = imported(AGGREGATE, "agg_x.json")
    assert cell["kind"] == "pd" and cell["budget"] == 8 and cell["budget_kind"] == "gpus"
    assert (cell["concurrency"], cell["input_tokens_asked"], cell["output_tokens_asked"]) == (64, 8192, 1024)
    assert dict(cell["client_summary"])["p99_ttft"] == 0.75 and not requests
    older = {"hw": "h100", "tp": 4, "conc": 8, "model": "m", "tput_per_gpu": 1.0}
    both = imported([AGGREGATE, older], "all.json")
    assert [c[0][0]["budget"] for c in both] == [8, 4]
    assert both[1][0][0]["kind"] is None  # it does not say


def test_hugging_face(imported):
    by_rate, by_users = imported(HUGGING_FACE, "results.json")
    cell = by_rate[0][0]
    assert cell["request_rate"] == 4.0 and cell["concurrency"] is None and cell["duration_s"] == 30.5
    assert (cell["requests_completed"], cell["requests_failed"]) == (118, 2)
    assert dict(cell["client_summary"])["time_to_first_token_ms_p90"] == 81.5
    assert by_users[0][0]["concurrency"] == 128 and by_users[0][0]["requests_failed"] is None


def test_sglang_lines(tmp_path):
    results = []
    for seed, concurrency in ((1, 4), (2, 8)):
        result = with_failures(detailed(seed=seed), 1)
        for key in ("num_prompts", "latencies", "start_times", "failed", "endpoint_type"):
            del result[key]
        result |= {
            "max_concurrency": concurrency,
            "request_rate": float("inf"),
            "random_input_len": 64,
            "total_output_tokens_retokenized": 100,
            "accept_length": None,
            "mean_e2e_latency_ms": 300.0,
        }
        results.append(result)
    cells = import_file(save(tmp_path / "s.jsonl", *results), tmp_path / "cells", {"layout": "sg lang"})
    assert [c.split("/")[2:] for c, _ in cells] == [["c4", "0-1"], ["c8", "0-2"]]
    row = pq.read_table(cells[1][1].cell).to_pylist()[0]
    assert row["client"] == "sglang bench_serving" and row["input_tokens_asked"] == 64
    assert row["requests_asked"] is None and row["requests_failed"] == 1 and row["layout"] == "sg lang"


def test_ids_are_stable_and_name_the_file_and_the_load(tmp_path):
    raw = save(tmp_path / "my run.json", detailed())
    once = import_file(raw, tmp_path / "a")
    again = import_file(raw, tmp_path / "b")
    assert [c for c, _ in once] == [c for c, _ in again]
    layout, workload, load, record = once[0][0].split("/")
    assert (
        layout.startswith("my-run-") and workload.startswith("imported-") and (load, record) == ("c4", "0-1")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}', "no known tool's result: found a; known are vllm"),
        ("[]", "a result object, or a list of them"),
        ("[{}]", "no known tool's result: found no key"),
        ('{"benchmarks": [', "ends early at byte 16"),
        ('{"benchmarks": []}', "holds no result"),
        ('{"metadata": {}, "metrics": {}}\n{"metadata":', "ends early at byte 44|ends early at byte 4"),
        ("", "file is empty"),
    ],
)
def test_foreign_and_broken_files_give_one_line(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        import_file(path, tmp_path / "cells")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("cells/**/*.parquet"))


SAMPLES = [
    [aiperf_record(0)],
    genai_export(),
    guidellm_report(True),
    guidellm_report(False),
    inference_perf_records(True),
    AGGREGATE,
    HUGGING_FACE,
]


@pytest.mark.parametrize("seed", range(120))
def test_mutated_foreign_files_never_traceback(tmp_path, seed):
    rng = random.Random(seed)
    content = json.loads(json.dumps(SAMPLES[seed % len(SAMPLES)]))
    for _ in range(rng.randint(1, 3)):
        _mutate(content, rng)
    path = tmp_path / "x.json"
    path.write_text("\n".join(map(json.dumps, content)) if seed % len(SAMPLES) == 0 else json.dumps(content))
    try:
        import_file(path, tmp_path / "cells")
    except UserError as error:
        assert "\n" not in str(error)


INSTEAD = [None, True, -1, 1.5, "x", [], {}, [1, "a"], {"a": [None]}, 10**400, float("nan")]


def _mutate(value, rng):
    """Put something else in place of a value somewhere inside, or take it away."""
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.75:
            value = value[key]
            continue
        if rng.random() < 0.3:
            del value[key]
        else:
            value[key] = rng.choice(
                [None, True, -1, 1.5, "x", [], {}, [1, "a"], {"a": [None]}, 10**400, float("nan")]
            )
        return
