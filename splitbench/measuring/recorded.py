# SPDX-License-Identifier: Apache-2.0
"""From a cell's files to what checks look at."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from splitbench.experiment.cells import Cell
from splitbench.experiment.models import Thresholds
from splitbench.files import read_json
from splitbench.measuring.around import lateness_series, loop_lateness
from splitbench.measuring.checks import EngineEvidence, Evidence
from splitbench.measuring.evidence import Series
from splitbench.measuring.floor import Row, nearest
from splitbench.measuring.logs import EngineLog, logs_from_json
from splitbench.measuring.run import CellFiles
from splitbench.measuring.smoke import chunk_tokens
from splitbench.measuring.telemetry import from_json


def telemetry_of(files: CellFiles) -> tuple[dict[str, Any], list[Series]]:
    """A cell's telemetry record, and all its series with the lateness of the client's event loop."""
    found: dict[str, Any] = read_json(files.telemetry)
    series = from_json(found["series"])
    return found, series + lateness_series(found["ticks"], float(found["clock_start_s"]))


def logs_of(files: CellFiles) -> dict[str, EngineLog]:
    """A cell's share of its engines' logs."""
    return logs_from_json(orjson.loads(gzip.decompress(files.logs.read_bytes())))


def evidence_of(
    cell: Cell,
    files: CellFiles,
    record: Mapping[str, Any],
    thresholds: Thresholds,
    *,
    percentiles: Sequence[float] = (),
    pooled_cells: int = 1,
    floor_rows: Sequence[Row] = (),
) -> Evidence:
    """What the checks of a cell look at.

    Args:
        cell: what was asked for.
        files: what came of it.
        record: the cell's record.
        thresholds: of the experiment.
        percentiles: asked of the cell.
        pooled_cells: cells that are taken together before a percentile is read.
        floor_rows: what the client's self-test found; empty: it was not run.
    """
    metrics = read_json(files.metrics)
    bench = orjson.loads(files.bench.read_bytes().replace(b"Infinity", b"null").replace(b"NaN", b"null"))
    telemetry, series = telemetry_of(files)
    plan = cell.plan
    return Evidence(
        kind=plan.kind,
        connector=plan.connector,
        prompts=cell.prompts,
        input_tokens=int(cell.load["input_tokens"]),
        output_tokens=int(cell.load["output_tokens"]),
        concurrency=cell.concurrency,
        warmups=int(record["warmups"]),
        warmup_seed_differs=record["warmup_seed"] != record["seed"],
        bench=bench,
        engines={
            name: EngineEvidence(role=found["role"], before=found["before"], after=found["after"])
            for name, found in metrics.items()
        },
        thresholds=thresholds,
        request_rate=cell.load.get("request_rate"),
        ramped=cell.load.get("ramp") is not None,
        exact_lengths=cell.load["dataset"] == "random" and not cell.load.get("range_ratio"),
        shared_percent=100 * int(cell.load.get("prefix_tokens", 0)) / int(cell.load["input_tokens"]),
        on_gpus=plan.budget.kind == "gpus",
        logs=logs_of(files),
        series=series,
        client_loop=_loop(telemetry, bench),
        clock_start_s=float(telemetry["clock_start_s"]),
        # Cells of older versions don't say; the layout's own cores are the least there can be.
        processors=int(telemetry.get("processors") or len({d for e in plan.engines for d in e.devices})),
        foreign=list(telemetry["foreign"]),
        smoke=record.get("smoke"),
        transports={engine.name: engine.env["UCX_TLS"] for engine in plan.engines if "UCX_TLS" in engine.env},
        chunk_tokens=chunk_tokens(plan),
        floor=nearest(floor_rows, cell.concurrency or _mean_in_flight(bench)),
        percentiles=percentiles,
        pooled_cells=pooled_cells,
    )


def _mean_in_flight(bench: Mapping[str, Any]) -> float | None:
    """Requests in flight over an open loop's whole run: by Little's law, seconds in the system per second."""
    times = [
        (start, start + (latency or 0.0))
        for start, latency in zip(bench.get("start_times") or [], bench.get("latencies") or [], strict=False)
        if start
    ]
    span_s = max((end for _, end in times), default=0.0) - min((start for start, _ in times), default=0.0)
    return sum(end - start for start, end in times) / span_s if span_s > 0 else None


def _loop(telemetry: Mapping[str, Any], bench: Mapping[str, Any]) -> dict[str, float] | None:
    starts = [start for start in bench.get("start_times") or [] if start]
    if not starts:
        return None
    latencies = [latency or 0.0 for latency in bench.get("latencies") or []]
    return loop_lateness(telemetry["ticks"], min(starts), max(starts) + max(latencies, default=0.0))
