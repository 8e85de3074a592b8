# SPDX-License-Identifier: Apache-2.0
"""A cell's files are enough to check it, and to write its rows."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from made_up import CLOCK_S, bench

from splitbench.experiment.cells import Cell
from splitbench.files import write_json
from splitbench.measuring.evidence import Check
from splitbench.measuring.run import CellFiles
from splitbench.measuring.stage import judge
from splitbench.tables.stage import write_cell_part, write_symmetry
from splitbench.workflow import Workflow
from tests.fakes.experiments import GOOD


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workflow:
    config: dict[str, Any] = copy.deepcopy(GOOD)
    config["stack"]["python"] = str(tmp_path / "python")
    (tmp_path / "python").write_text("")
    config["workloads"] = {"w": {"input_tokens": 64, "output_tokens": 16, "prompts": {"per_concurrency": 4}}}
    config["matrix"] = {"concurrency": [4]}
    config["slo"] = {"percentile": 50}
    monkeypatch.chdir(tmp_path)
    return Workflow(config)


def cell_of(flow: Workflow, layout: str) -> Cell:
    return next(cell for cell in flow.cells.all if cell.layout == layout)


def facts(**values: Any) -> dict[str, Any]:
    return {name: {"value": value, "source": "server_info"} for name, value in values.items()}


def keep(flow: Workflow, cell: Cell, *, log: str = "", moved: float = 1024.0, eager: bool = False) -> None:
    """Files of a sound cell of 16 requests."""
    files = CellFiles(Path(flow.path(f"cells/{cell.cell_id}")))
    files.folder.mkdir(parents=True)
    engines = [(engine.name, engine.role) for engine in cell.plan.engines]
    source = 'vllm:prompt_tokens_by_source_total{source="%s"}'
    after = {
        "vllm:prefix_cache_queries_total": 1024.0,
        "vllm:prefix_cache_hits_total": 0.0,
        source % "external_kv_transfer": moved,
        source % "local_compute": 1024.0 - moved,
        "vllm:nixl_bytes_transferred_sum": moved,
    }
    written = {
        files.bench: bench(16),
        files.metrics: {name: {"role": role, "before": {}, "after": after} for name, role in engines},
        files.telemetry: {
            "series": [
                {"source": "client", "metric": "cpu_percent", "time_s": [1.2, 1.4], "value": [9.0, 8.0]}
            ],
            "foreign": [],
            "clock_start_s": CLOCK_S,
            "ticks": [[CLOCK_S + 1 + n / 20, 0.0002] for n in range(24)],
        },
        files.engine_facts: {
            "format": 1,
            "engines": {
                name: {"role": role, "devices": [0], "facts": facts(dtype="bfloat16", enforce_eager=eager)}
                for name, role in engines
            },
        },
        files.record: {
            "warmups": 4,
            "warmup_seed": 1,
            "seed": 2,
            "order": 0,
            "started_at": "2026-12-01T10:00:00.000+00:00",
            "session": {"id": "s", "age_s": 1.0},
            "environment_digest": "e",
            "code_version": "0",
            "smoke": {
                "same-answers": Check("same-answers", "ok", "equal").as_dict(),
            },
        },
    }
    for path, content in written.items():
        path.write_text(json.dumps(content))
    logs = {name: {"role": role, "start": "", "cell": log} for name, role in engines}
    files.logs.write_bytes(gzip.compress(json.dumps(logs).encode()))


def test_a_sound_pd_cell_passes_all_from_its_files(flow: Workflow) -> None:
    cell = cell_of(flow, "pd")
    keep(flow, cell, log="UCX INFO ucp_context_0 intra-node cfg#1 rma(tcp/lo) am(tcp/lo)\n")
    found = judge(flow, cell)
    assert len(found) == 13
    assert {check.name: check.verdict for check in found if check.verdict != "ok"} == {}


def test_what_is_wrong_in_the_files_is_found(flow: Workflow) -> None:
    cell = cell_of(flow, "pd")
    keep(flow, cell, moved=0.0, log="ERROR NIXL transfer failure: transfer_failed | Context\n")
    found = {check.name: check.verdict for check in judge(flow, cell)}
    assert (found["kv-moved"], found["server-log"]) == ("invalid", "invalid")


def test_the_floor_of_the_client_counts_when_it_was_measured(flow: Workflow) -> None:
    cell = cell_of(flow, "agg")
    keep(flow, cell)
    before = {check.name: check for check in judge(flow, cell)}["client"]
    row = {"streams": 4, "itl_error_p50_ms": 0.1, "itl_error_p99_ms": 9.0}
    write_json(Path(flow.floor_path), {"rows": [row]})
    after = {check.name: check for check in judge(flow, cell)}["client"]
    assert (before.verdict, after.verdict) == ("ok", "warn")


def test_rows_and_verdict_of_a_cell(flow: Workflow, tmp_path: Path) -> None:
    cell = cell_of(flow, "agg")
    keep(flow, cell)
    write_cell_part(flow, cell.cell_id, tmp_path / "part")
    verdict = json.loads((tmp_path / "part" / "checks.json").read_text())
    assert verdict["verdict"] == "ok", verdict
    telemetry = pq.read_table(tmp_path / "part" / "telemetry.parquet").to_pandas()
    assert set(telemetry["metric"]) == {"cpu_percent", "loop_late_max_ms"}
    assert telemetry[telemetry["metric"] == "cpu_percent"]["value"].tolist() == [9.0, 8.0]
    checks = pq.read_table(tmp_path / "part" / "checks.parquet").to_pandas().set_index("check")
    assert dict(checks.loc["load", "thresholds"]) == {"percent": 95.0}


def test_layouts_of_one_budget_are_compared(flow: Workflow, tmp_path: Path) -> None:
    keep(flow, cell_of(flow, "agg"))
    keep(flow, cell_of(flow, "pd"), eager=True)
    write_symmetry(flow, tmp_path / "symmetry.json")
    budgets = json.loads((tmp_path / "symmetry.json").read_text())["budgets"]
    assert list(budgets) == ["2 cores"]
    assert budgets["2 cores"]["verdict"] == "warn"
    assert budgets["2 cores"]["reason"] == "enforce_eager: agg false, pd true"
