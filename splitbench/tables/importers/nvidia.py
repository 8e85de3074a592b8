# SPDX-License-Identifier: Apache-2.0
"""AIPerf and its predecessor GenAI-Perf."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from splitbench.errors import UserError
from splitbench.tables.importers.common import (
    Imported,
    Request,
    differences,
    first,
    flat_numbers,
    get,
    items,
    load,
    moment,
    number,
    seconds,
    texts,
    whole,
)


def aiperf_records(path: Path) -> Iterator[Imported]:
    """`profile_export.jsonl`: one record per request. Warm-up records are left out.

    ITLs are the format's inter-chunk latencies. The load is not in this file (its summary has it).
    """
    starts_ns: list[int | None] = []
    rows: list[Request] = []
    with path.open("rb") as handle:
        at = 0
        for line in handle:
            if line.strip():
                record = _record(line, at, path)
                if get(record, "metadata", "benchmark_phase") != "warmup":
                    start = get(record, "metadata", "request_start_ns")
                    starts_ns.append(start if isinstance(start, int) else None)
                    rows.append(_aiperf_request(record))
            at += len(line)
    known = [start for start in starts_ns if start is not None]
    origin = min(known) if known else 0
    for row, start in zip(rows, starts_ns, strict=True):
        # Subtracted as whole numbers: a double cannot hold nanoseconds since 1970.
        row.start_s = None if start is None else (start - origin) / 1e9
    order = sorted(range(len(rows)), key=lambda k: (starts_ns[k] is None, starts_ns[k] or 0))
    facts = {"client": "aiperf", "started_at": moment(origin / 1e9), "detailed": True}
    yield Imported(facts, [rows[k] for k in order], has_gaps=True)


def _record(line: bytes, at: int, path: Path) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            where = at + getattr(error, "pos", 0)
            what = "ends early" if not line.endswith(b"\n") else "is no JSON"
            raise UserError(
                f"{what} at byte {where}; one record per line is expected", where=str(path)
            ) from error


def _aiperf_request(record: Any) -> Request:
    metrics, error = get(record, "metrics") or {}, get(record, "error")

    def duration(name: str) -> float | None:
        return seconds(get(metrics, name, "value"), get(metrics, name, "unit"))

    unit = get(metrics, "inter_chunk_latency", "unit")
    gaps = [seconds(g, unit) for g in items(get(metrics, "inter_chunk_latency", "value"))]
    cancelled = get(record, "metadata", "was_cancelled") is True
    return Request(
        ok=error is None and not cancelled,
        error=str(first(get(error, "message"), get(error, "type"), "cancelled"))
        if error or cancelled
        else None,
        ttft_s=duration("time_to_first_token"),
        e2e_s=duration("request_latency"),
        itl_mean_s=duration("inter_token_latency"),
        input_tokens=first(
            number(get(metrics, "input_sequence_length", "value")), number(get(metrics, "error_isl", "value"))
        ),
        output_tokens=number(get(metrics, "output_sequence_length", "value")),
        gaps_s=[g for g in gaps if g is not None],
    )


def summary(path: Path) -> Iterator[Imported]:
    """`profile_export_aiperf.json`, `profile_export_genai_perf.json`: statistics per metric, no requests."""
    content = load(path)
    metrics = {k: v for k, v in content.items() if isinstance(v, Mapping) and "unit" in v}
    figures: dict[str, float] = {}
    for name, block in metrics.items():
        figures |= {f"{name}.{stat}.{block['unit']}": v for stat, v in flat_numbers(block).items()}
    config = content.get("input_config")
    failed = whole(get(metrics, "error_request_count", "avg"))
    version = content.get("aiperf_version")
    yield Imported(
        {
            "client": "aiperf" if version or "schema_version" in content else "genai-perf",
            "client_version": version if isinstance(version, str) else None,
            "concurrency": whole(_anywhere(config, "concurrency")),
            "request_rate": number(_anywhere(config, "request_rate")),
            "duration_s": number(get(metrics, "benchmark_duration", "avg")),
            "requests_completed": whole(get(metrics, "request_count", "avg")),
            "requests_failed": failed,
            "output_tokens_total": whole(get(metrics, "total_output_tokens", "avg")),
            "detailed": False,
            "client_summary": figures,
            "client_other": texts(
                content, ("input_config", "run_info", "start_time", "end_time", "error_summary")
            ),
        }
    )


def _anywhere(value: Any, key: str) -> Any:
    """A number under this key at any depth: the place moved from version to version."""
    if not isinstance(value, Mapping):
        return None
    if number(value.get(key)) is not None:
        return value[key]
    return next((found for v in value.values() if (found := _anywhere(v, key)) is not None), None)


def genai_perf_requests(path: Path) -> Iterator[Imported]:
    """`profile_export.json`: request and response times in nanoseconds, one cell per experiment.

    The file has no token counts (its tool counts them afterwards with a tokenizer): these are null. Responses
    without text (role, empty delta, end mark) carry no token and are passed over, as the tool itself does.
    """
    content = load(path)
    for experiment in items(content.get("experiments")):
        mode, value = get(experiment, "experiment", "mode"), get(experiment, "experiment", "value")
        records = [r for r in items(get(experiment, "requests")) if isinstance(r, Mapping)]
        records.sort(key=lambda r: number(r.get("timestamp")) or 0.0)
        origin = next((r["timestamp"] for r in records if isinstance(r.get("timestamp"), int)), 0)
        facts = {
            "client": "genai-perf",
            "concurrency": whole(value) if mode == "concurrency" else None,
            "request_rate": number(value) if mode == "request_rate" else None,
            "started_at": moment(origin / 1e9),
            "detailed": True,
            "client_other": texts(content, ("service_kind", "endpoint")),
        }
        yield Imported(facts, [_genai_request(r, origin) for r in records], has_gaps=True)


def _genai_request(record: Mapping[str, Any], origin: int) -> Request:
    times = [t for t in items(record.get("response_timestamps")) if isinstance(t, int)]
    outputs = items(record.get("response_outputs"))
    if len(outputs) == len(times):
        times = [t for t, output in zip(times, outputs, strict=True) if _has_text(output)]
    start = record.get("timestamp")
    if not isinstance(start, int) or not times:
        return Request(ok=False, error="no response with text")
    return Request(
        start_s=(start - origin) / 1e9,
        ttft_s=(times[0] - start) / 1e9,
        e2e_s=(times[-1] - start) / 1e9,
        gaps_s=differences(times, 1e9),
    )


def _has_text(output: Any) -> bool:
    text = first(get(output, "text_output"), get(output, "response"))
    if not isinstance(text, str):
        return True  # a backend whose answers are not kept: every response counts
    if not text.startswith("data:"):
        return bool(text)
    for event in text.split("data:")[1:]:
        try:
            choices = items(get(json.loads(event), "choices"))
        except ValueError:
            continue
        if any(first(get(c, "delta", "content"), get(c, "text")) for c in choices):
            return True
    return False
