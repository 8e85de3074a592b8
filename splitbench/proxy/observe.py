# SPDX-License-Identifier: Apache-2.0
"""What the proxy tells of itself: a record per request, and counters in Prometheus' text form."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import Any

import orjson

from splitbench.errors import UserError

STAGES = (
    "prefill_sent",
    "prefill_answered",
    "kv_ready",
    "decode_sent",
    "decode_first_byte",
    "first_byte",
    "last_byte",
)
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RequestRecord:
    """When the stages of one request happened (monotonic clock, seconds) and which engines served it.

    A stage that did not happen is absent, never zero.
    """

    __slots__ = (
        "arrival_s",
        "arrival_unix_s",
        "client_id",
        "decoder",
        "endpoint",
        "error",
        "first_token",
        "id",
        "kv_moved",
        "part",
        "prefiller",
        "stages",
        "status",
    )

    def __init__(self, request_id: str, client_id: str | None, endpoint: str, arrival_s: float) -> None:
        self.id = request_id
        self.client_id = client_id
        self.endpoint = endpoint
        self.arrival_s = arrival_s
        self.arrival_unix_s = time.time()
        self.stages: dict[str, float] = {}
        self.prefiller: str | None = None
        self.decoder: str | None = None
        self.first_token = "decoder"
        self.kv_moved: bool | None = None
        self.part: int | None = None
        self.status = 0
        self.error: str | None = None

    def part_of(self, index: int) -> RequestRecord:
        """Record of one prompt of a request that holds several."""
        record = RequestRecord(f"{self.id}.{index}", self.client_id, self.endpoint, self.arrival_s)
        record.arrival_unix_s = self.arrival_unix_s
        record.part = index
        return record

    def row(self) -> dict[str, Any]:
        """The record as written: stages in ms after arrival."""
        row: dict[str, Any] = {
            "request_id": self.id,
            "client_request_id": self.client_id,
            "endpoint": self.endpoint,
            "status": self.status,
            "error": self.error,
            "prefiller": self.prefiller,
            "decoder": self.decoder,
            "first_token": self.first_token,
            "kv_moved": self.kv_moved,
            "arrival_unix_s": self.arrival_unix_s,
        }
        for stage in STAGES:
            moment_s = self.stages.get(stage)
            row[f"{stage}_ms"] = None if moment_s is None else round((moment_s - self.arrival_s) * 1000, 3)
        if self.part is not None:
            row["part"] = self.part
        return row


class TraceFile:
    """JSON lines, one whole line per write, so that a reader or a crash never meets half a record."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror}",
                where="--trace-file",
                mend="name a file in a writable folder",
            ) from None

    def write(self, record: RequestRecord) -> None:
        """Append one record."""
        os.write(self._descriptor, orjson.dumps(record.row(), option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Histogram:
    """Cumulative histogram of seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, value_s: float) -> None:
        """Count one value."""
        self.counts[bisect_left(BUCKETS_S, value_s)] += 1
        self.sum_s += value_s

    def lines(self, name: str, labels: str) -> list[str]:
        """Prometheus lines."""
        lines, total = [], 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*lines, f"{name}_sum{{{labels}}} {self.sum_s:.9g}", f"{name}_count{{{labels}}} {total}"]


# From which stage to which, for the histogram of stage lengths.
SPANS = (
    ("prefill", "prefill_sent", "prefill_answered"),
    ("kv_wait", "prefill_answered", "kv_ready"),
    ("handoff", "kv_ready", "decode_sent"),
    ("decode_first_byte", "decode_sent", "decode_first_byte"),
    ("answer", "first_byte", "last_byte"),
)


class Metrics:
    """Counters of the proxy."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.cancelled = 0
        self.in_flight = 0
        self.reads = 0
        self.kv_waiting = 0
        self.kv_not_moved = 0
        self.notifications: Counter[str] = Counter()
        self.releases: Counter[str] = Counter()
        self.spans = {name: Histogram() for name, _, _ in SPANS}

    def count(self, record: RequestRecord) -> None:
        """Count a finished request and its stages."""
        self.requests[record.endpoint, record.status] += 1
        stages = record.stages
        for name, start, end in SPANS:
            if start in stages and end in stages:
                self.spans[name].add(max(0.0, stages[end] - stages[start]))

    def text(self, mode: str, engines: list[tuple[str, str, int, int, int]]) -> str:
        """Prometheus exposition; `engines` are (role, name, in flight, requests, failures)."""
        prefix = "splitbench_proxy"
        lines: list[str] = []

        def family(name: str, kind: str, help_text: str, samples: list[str]) -> None:
            lines.extend((f"# HELP {prefix}_{name} {help_text}", f"# TYPE {prefix}_{name} {kind}", *samples))

        def single(name: str, kind: str, help_text: str, value: float) -> None:
            family(name, kind, help_text, [f"{prefix}_{name} {value:g}"])

        family("info", "gauge", "How the proxy runs.", [f'{prefix}_info{{mode="{mode}"}} 1'])
        family(
            "requests_total",
            "counter",
            "Answered requests.",
            [
                f'{prefix}_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'
                for (endpoint, status), count in sorted(self.requests.items())
            ],
        )
        single("cancelled_total", "counter", "Requests whose client left.", self.cancelled)
        single("in_flight", "gauge", "Requests in work.", self.in_flight)
        single("relayed_reads_total", "counter", "Reads of answer bytes that were passed on.", self.reads)
        single("kv_waiting", "gauge", "Requests that wait for their KV.", self.kv_waiting)
        single("kv_not_moved_total", "counter", "Prefills that handed no KV over.", self.kv_not_moved)
        family(
            "kv_notifications_total",
            "counter",
            "Notifications of complete KV, by what they met.",
            [
                f'{prefix}_kv_notifications_total{{kind="{k}"}} {n}'
                for k, n in sorted(self.notifications.items())
            ],
        )
        family(
            "kv_releases_total",
            "counter",
            "KV of abandoned requests that was consumed to free it.",
            [f'{prefix}_kv_releases_total{{result="{k}"}} {n}' for k, n in sorted(self.releases.items())],
        )
        for position, (name, kind, help_text) in enumerate(
            (
                ("engine_in_flight", "gauge", "Requests at an engine."),
                ("engine_requests_total", "counter", "Requests sent to an engine."),
                ("engine_failures_total", "counter", "Requests that an engine did not answer as it must."),
            )
        ):
            family(
                name,
                kind,
                help_text,
                [f'{prefix}_{name}{{role="{e[0]}",engine="{e[1]}"}} {e[2 + position]}' for e in engines],
            )
        samples: list[str] = []
        for span, histogram in self.spans.items():
            samples += histogram.lines(f"{prefix}_stage_seconds", f'stage="{span}"')
        family("stage_seconds", "histogram", "Length of the stages of a request.", samples)
        return "\n".join(lines) + "\n"
