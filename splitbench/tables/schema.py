# SPDX-License-Identifier: Apache-2.0
"""The tables that outlive the run: columns, types, units and meaning, in one place.

Everything else follows from here: the Arrow schemas, the Parquet parts, the reference in docs/tables.md.
Latencies are in milliseconds, times and durations in seconds, as the column names say. A value that the
source lacks is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 1
"""Raised whenever a column changes its meaning or goes away; a new nullable column does not raise it."""

# One value per part, so dictionary encoding makes the column nearly free on disk and in memory.
CELL_ID = pa.dictionary(pa.int32(), pa.string())
NUMBERS = pa.map_(pa.string(), pa.float64())
TEXTS = pa.map_(pa.string(), pa.string())


@dataclass(frozen=True)
class Column:
    """One column: name (with its unit), Arrow type, meaning, and whether it may be null."""

    name: str
    type: pa.DataType
    meaning: str
    nullable: bool = True


@dataclass(frozen=True)
class Table:
    """One table: what a row is, its columns, and the file that holds a cell's part of it."""

    name: str
    row: str
    file: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema, without lineage metadata."""
        return pa.schema([pa.field(c.name, c.type, nullable=c.nullable) for c in self.columns])


def _key(meaning: str = "the cell, `<layout>-<hash8>/<workload>-<hash8>/c<N>/<restart>-<repeat>`") -> Column:
    return Column("cell_id", CELL_ID, meaning, nullable=False)


_text, _int32, _int64, _float, _bool = pa.string(), pa.int32(), pa.int64(), pa.float64(), pa.bool_()

CELLS = Table(
    "cells",
    "one benchmark run (layout x restart x workload x load x repeat)",
    "cell.parquet",
    (
        Column(
            "cell_id",
            _text,
            "stable key, `<layout>-<hash8>/<workload>-<hash8>/c<N>/<restart>-<repeat>`",
            nullable=False,
        ),
        Column("experiment", _text, "the config file's experiment name"),
        Column("layout", _text, "name of the layout"),
        Column("kind", _text, "`aggregated`, `pd` or `replicas`"),
        Column("connector", _text, "KV connector of a PD layout"),
        Column("first_token", _text, "who sends the first token of a PD answer: `prefiller` or `decoder`"),
        Column("budget_kind", _text, "what the budget counts: `cores` or `gpus`"),
        Column("budget", _int32, "accelerators (or cores) that the layout occupies, all engines together"),
        Column(
            "share",
            _text,
            "how engines share accelerators: `mps 50+50` (percent, in the order of engines) or `time-sliced`; "
            "null: they do not",
        ),
        Column("workload", _text, "name of the workload"),
        Column("input_tokens_asked", _int32, "input tokens per request that the workload asks for"),
        Column("output_tokens_asked", _int32, "output tokens per request that the workload asks for"),
        Column("concurrency", _int32, "cap on requests in flight; null for open loop"),
        Column("request_rate", _float, "offered requests per second; null means unlimited (`inf`)"),
        Column("burstiness", _float, "shape of the gamma-distributed gaps between arrivals; 1 is Poisson"),
        Column("restart", _int32, "number of the session (server start) within the layout"),
        Column("repeat", _int32, "number of the repeat within the session"),
        Column("seed", _int64, "seed of the prompts; equal across layouts, so cells pair up"),
        Column("order_number", _int64, "place of the cell in the randomised running order"),
        Column("session_id", _text, "the session the cell ran in"),
        Column("session_age_s", _float, "age of that session at the cell's start"),
        Column("started_at", pa.timestamp("us", tz="UTC"), "wall clock at the cell's start"),
        Column("duration_s", _float, "benchmark duration as the client states it"),
        Column("clock_origin_s", _float, "client clock at the first request; start_s counts from here"),
        Column("requests_asked", _int32, "requests the client was told to send"),
        Column("requests_completed", _int32, "requests answered in full"),
        Column("requests_failed", _int32, "requests that failed"),
        Column("input_tokens_total", _int64, "input tokens of all completed requests"),
        Column("output_tokens_total", _int64, "output tokens of all completed requests"),
        Column(
            "detailed", _bool, "whether the source held one entry per request; if false only totals exist"
        ),
        Column("plan_digest", _text, "digest of the layout's launch plan"),
        Column("workload_digest", _text, "digest of the workload's slice of the config"),
        Column("cell_digest", _text, "digest of the cell's effective slice"),
        Column("stack", _text, "name of the serving stack"),
        Column("stack_digest", _text, "digest of the stack's lock"),
        Column("environment_digest", _text, "digest of the machine and software record"),
        Column("node", _text, "label of the machine that the cell ran on: the same for the same host name"),
        Column("client", _text, "tool that made the source file"),
        Column("client_version", _text, "version of that tool"),
        Column("code_version", _text, "version of splitbench that ran the cell"),
        Column(
            "verdict",
            _text,
            "`ok`, `warn` or `invalid`: the worst of the cell's checks; null before they ran",
        ),
        Column("source_name", _text, "name of the source file (no folder), `#N` for the N-th result in it"),
        Column("source_sha256", _text, "sha256 of the source file"),
        Column(
            "client_summary", NUMBERS, "every further number at the source's top level, under its own key"
        ),
        Column("client_other", TEXTS, "every further value there, as text (JSON where it is not a string)"),
    ),
)

REQUESTS = Table(
    "requests",
    "one request, failed ones included",
    "requests.parquet",
    (
        _key(),
        Column("request", _int32, "number of the request in submission order, from 0", nullable=False),
        Column("ok", _bool, "whether it was answered in full", nullable=False),
        Column("error", _text, "the client's error text; empty if it failed without one, null if it is ok"),
        Column(
            "start_s", _float, "start, seconds after the cell's first start; null if the source has no times"
        ),
        Column("ttft_ms", _float, "time to first token; null where none came"),
        Column(
            "second_token_ms", _float, "time to second token, TTFT + first ITL: same content for every layout"
        ),
        Column("e2e_ms", _float, "time to the last token; null for a failed request"),
        Column(
            "e2e_derived", _bool, "true where e2e_ms is TTFT + sum of ITLs because the source has no latency"
        ),
        Column("queue_ms", _float, "wait in the client before sending, where the source states it"),
        Column("tpot_ms", _float, "(e2e - TTFT) / (output tokens - 1); null below two tokens"),
        Column("itl_mean_ms", _float, "mean of the request's ITLs"),
        Column(
            "itl_p99_ms", _float, "99th percentile of the request's ITLs (linear between order statistics)"
        ),
        Column("itl_max_ms", _float, "largest of the request's ITLs"),
        Column(
            "handoff_gap_ms",
            _float,
            "first ITL less the median of the later ones: KV wait and decoder queue; only where the "
            "prefiller sends the first token, null elsewhere (there the hand-off is inside the TTFT)",
        ),
        Column("itls", _int32, "number of ITLs; output_tokens - 1 if every chunk carried one token"),
        Column("input_tokens", _int32, "input tokens as the source counts them"),
        Column("output_tokens", _int32, "output tokens as the source counts them"),
    ),
)

TOKENS = Table(
    "tokens",
    "one inter-token latency (the gap before the token at `position`)",
    "tokens.parquet",
    (
        _key(),
        Column("request", _int32, "number of the request within the cell", nullable=False),
        Column(
            "position",
            _int32,
            "place of the later token in the answer, from 1 (0 is the first token)",
            nullable=False,
        ),
        Column("itl_ms", _float, "inter-token latency, source seconds x 1000", nullable=False),
        Column("ok", _bool, "whether the request was answered in full", nullable=False),
    ),
)

TELEMETRY = Table(
    "telemetry",
    "one sample of one metric of one thing during a cell",
    "telemetry.parquet",
    (
        _key(),
        Column("time_s", _float, "seconds after the cell's start; negative before it", nullable=False),
        Column(
            "source",
            _text,
            "what was sampled: `client`, `engine:<role><n>`, `gpu:<n>`, `host`",
            nullable=False,
        ),
        Column(
            "metric", _text, "metric with its unit, as in `sm_clock_mhz` or `cpu_percent`", nullable=False
        ),
        Column("value", _float, "the sample", nullable=False),
    ),
)

ENGINE_FACTS = Table(
    "engine_facts",
    "one fact about one engine, as the engine itself stated it",
    "engine_facts.parquet",
    (
        _key(),
        Column("engine", _text, "name of the engine in the plan", nullable=False),
        Column("role", _text, "`aggregated`, `prefill` or `decode`"),
        Column("fact", _text, "name of the fact, as in `enforce_eager` or `kv_cache_tokens`", nullable=False),
        Column("value", _text, "the fact as text; JSON where it is not a string"),
        Column("number", _float, "the fact as a number where it is one"),
        Column("evidence", _text, "where it was read: `server_info`, `log:<line>`, `metrics`"),
    ),
)

CHECKS = Table(
    "checks",
    "one check of one cell",
    "checks.parquet",
    (
        _key(),
        Column("check", _text, "name of the check", nullable=False),
        Column("outcome", _text, "`ok`, `warn` or `invalid`", nullable=False),
        Column("reason", _text, "one line: why"),
        Column("figures", NUMBERS, "the numbers behind it"),
        Column("thresholds", NUMBERS, "the limits that were applied"),
    ),
)

TABLES: Mapping[str, Table] = {
    table.name: table for table in (CELLS, REQUESTS, TOKENS, TELEMETRY, ENGINE_FACTS, CHECKS)
}

LINEAGE_KEYS: Mapping[str, str] = {
    "splitbench.table": "name of the table",
    "splitbench.schema_version": "version of these tables",
    "splitbench.cell_id": "the cell whose part this is",
    "splitbench.cell_digest": "digest of the cell's effective slice",
    "splitbench.environment_digest": "digest of the machine and software record",
    "splitbench.code_version": "version of splitbench that ran the cell",
    "splitbench.ingest_version": "version of splitbench that wrote this file",
    "splitbench.source_name": "name of the source file",
    "splitbench.source_sha256": "sha256 of the source file",
}
"""Keys in the metadata of every part; a key is absent where its value is unknown."""
