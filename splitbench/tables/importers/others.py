# SPDX-License-Identifier: Apache-2.0
"""guidellm, inference-perf, InferenceX and Hugging Face inference-benchmarker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from splitbench.tables.importers.common import (
    Imported,
    Request,
    differences,
    first,
    flat_numbers,
    get,
    items,
    less,
    load,
    moment,
    number,
    texts,
    whole,
)


def guidellm(path: Path) -> Iterator[Imported]:
    """`benchmarks.json`: one cell per benchmark, requests grouped by their end.

    The format has the first and the last token's time but no single gaps: ITLs are null, their mean is not.
    """
    for benchmark in items(load(path).get("benchmarks")):
        strategy = first(
            get(benchmark, "config", "strategy"),
            get(benchmark, "scheduler", "strategy"),
            get(benchmark, "args", "strategy"),
        )
        kind = get(strategy, "type_")
        streams = first(get(strategy, "streams"), get(strategy, "max_concurrency"))
        start = first(get(benchmark, "start_time"), get(benchmark, "run_stats", "start_time"))
        end = first(get(benchmark, "end_time"), get(benchmark, "run_stats", "end_time"))
        facts = {
            "client": "guidellm",
            "concurrency": 1 if kind == "synchronous" else whole(streams) if kind == "concurrent" else None,
            "request_rate": number(get(strategy, "rate")) if kind in ("constant", "poisson") else None,
            "started_at": moment(start),
            "duration_s": first(number(get(benchmark, "duration")), less(end, start)),
            "detailed": True,
            "client_summary": flat_numbers(get(benchmark, "metrics")),
            "client_other": {"strategy": str(kind)} if kind else {},
        }
        groups = get(benchmark, "requests")
        rows = [_guidellm_request(r, None) for r in items(get(groups, "successful"))]
        rows += [_guidellm_request(r, "incomplete") for r in items(get(groups, "incomplete"))]
        rows += [_guidellm_request(r, "errored") for r in items(get(groups, "errored"))]
        rows.sort(key=lambda r: (r.start_s is None, r.start_s or 0.0))
        yield Imported(facts, rows)


def _guidellm_request(record: Any, failure: str | None) -> Request:
    times = get(record, "info", "timings")
    start = first(get(record, "request_start_time"), get(record, "start_time"), get(times, "request_start"))
    end = first(get(record, "request_end_time"), get(record, "end_time"), get(times, "request_end"))
    first_token = first(get(record, "first_token_time"), get(times, "first_token_iteration"))
    output = first(
        number(get(record, "output_tokens")), number(get(record, "output_metrics", "total_tokens"))
    )
    ttft_ms = number(get(record, "time_to_first_token_ms"))
    mean_ms = number(get(record, "inter_token_latency_ms")) if (output or 0) > 1 else None
    error = first(get(record, "error"), get(record, "info", "error"), failure)
    return Request(
        ok=failure is None,
        error=str(error) if failure else None,
        start_s=number(start),
        ttft_s=ttft_ms / 1e3 if ttft_ms is not None else less(first_token, start),
        e2e_s=first(number(get(record, "request_latency")), less(end, start)),
        queue_s=less(get(times, "dequeued"), get(times, "queued")),
        itl_mean_s=mean_ms / 1e3 if mean_ms is not None else None,
        input_tokens=first(
            number(get(record, "prompt_tokens")), number(get(record, "input_metrics", "total_tokens"))
        ),
        output_tokens=output,
    )


def inference_perf_requests(path: Path) -> Iterator[Imported]:
    """`per_request_lifecycle_metrics.json`: times of every token; one cell per named load stage."""
    records = [r for r in items(load(path)) if isinstance(r, Mapping)]
    stages: dict[Any, list[Request]] = {}
    for record in sorted(records, key=lambda r: number(r.get("start_time")) or 0.0):
        stage = record.get("stage_id")
        stages.setdefault(stage if isinstance(stage, int | str) else None, []).append(
            _inference_perf_request(record)
        )
    for stage, rows in stages.items():
        other = {} if stage is None else {"stage_id": str(stage)}
        yield Imported(
            {"client": "inference-perf", "detailed": True, "client_other": other}, rows, has_gaps=True
        )


def _inference_perf_request(record: Mapping[str, Any]) -> Request:
    info, start = record.get("info"), record.get("start_time")
    answer = first(get(info, "response_metrics"), info)
    times = [t for t in items(get(answer, "output_token_times")) if number(t) is not None]
    error = record.get("error")
    text = first(get(error, "error_msg"), get(error, "error_type"), error)
    return Request(
        ok=error is None,
        error=None if error is None else str(text),
        start_s=number(start),
        ttft_s=less(times[0], start) if times else None,
        e2e_s=less(record.get("end_time"), start),
        input_tokens=first(
            number(get(info, "input_tokens")), number(get(info, "request_metrics", "text", "input_tokens"))
        ),
        output_tokens=first(number(get(answer, "output_tokens")), number(get(info, "output_tokens"))),
        gaps_s=differences(times),
    )


def inference_perf_summary(path: Path) -> Iterator[Imported]:
    """`stage_N_lifecycle_metrics.json`, `summary_lifecycle_metrics.json`: totals and statistics."""
    content = load(path)
    yield Imported(
        {
            "client": "inference-perf",
            "request_rate": number(get(content, "load_summary", "requested_rate")),
            "requests_asked": whole(get(content, "load_summary", "count")),
            "requests_completed": whole(get(content, "successes", "count")),
            "requests_failed": whole(get(content, "failures", "count")),
            "detailed": False,
            "client_summary": flat_numbers(content),
        }
    )


def inferencex(path: Path) -> Iterator[Imported]:
    """`agg_*.json`: one object, or a list of them; latencies in seconds under the client's names."""
    content = load(path)
    for row in content if isinstance(content, list) else [content]:
        apart = number(row.get("num_prefill_gpu")), number(row.get("num_decode_gpu"))
        gpus = sum(apart) if None not in apart else number(row.get("tp"))  # type: ignore[arg-type]
        disaggregated = row.get("disagg")
        kind = (
            {True: "pd", False: "aggregated"}.get(disaggregated) if isinstance(disaggregated, bool) else None
        )
        yield Imported(
            {
                "client": "inferencex",
                "kind": kind,
                "budget_kind": "gpus" if gpus is not None else None,
                "budget": whole(gpus),
                "concurrency": whole(row.get("conc")),
                "input_tokens_asked": whole(row.get("isl")),
                "output_tokens_asked": whole(row.get("osl")),
                "detailed": False,
                "client_summary": flat_numbers(row, skip=("conc", "isl", "osl")),
                "client_other": texts(row, [k for k, v in row.items() if isinstance(v, str | bool)]),
            }
        )


def hugging_face(path: Path) -> Iterator[Imported]:
    """`results.json`: averages and two percentiles per step; the warm-up step is left out."""
    content = load(path)
    for step in items(content.get("results")):
        if not isinstance(step, Mapping) or step.get("id") == "warmup":
            continue
        config, rate = step.get("config"), number(get(step, "config", "rate"))
        duration_ms = number(step.get("duration_ms"))
        yield Imported(
            {
                "client": "inference-benchmarker",
                # With a fixed arrival rate, max_vus only bounds the requests in flight.
                "concurrency": whole(get(config, "max_vus")) if rate is None else None,
                "request_rate": rate,
                "duration_s": duration_ms / 1e3 if duration_ms is not None else None,
                "requests_completed": whole(step.get("successful_requests")),
                "requests_failed": whole(step.get("failed_requests")),
                "input_tokens_total": whole(step.get("total_tokens_sent")),
                "output_tokens_total": whole(step.get("total_tokens")),
                "detailed": False,
                "client_summary": flat_numbers(step),
                "client_other": texts(step, ("id", "executor_type"))
                | texts(content, ("start_time", "end_time")),
            }
        )
