# SPDX-License-Identifier: Apache-2.0
"""The demo's own path on real engines, with few prompts: from the config to figures and page."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from splitbench.measuring.metrics import growth
from tests.workflow.flow import REPOSITORY, Flow

pytestmark = pytest.mark.real

PROMPTS = 6
INPUT_TOKENS, OUTPUT_TOKENS = 256, 12
# What must hold on any machine, however loaded; near-zero ITLs depend on who else wants the cores.
MUST_HOLD = {"completion", "tokens", "warm-up", "fresh-prompts", "kv-moved"}


def small_demo() -> dict[str, Any]:
    """The demo with one workload, two loads and few prompts."""
    config: dict[str, Any] = yaml.safe_load(
        (REPOSITORY / "config" / "config.yaml").read_text(encoding="utf-8")
    )
    config = copy.deepcopy(config)
    config["experiment"] = "real"
    config.pop("claims", None)  # they are about the workloads that are replaced here
    config["workloads"] = {
        "some": {
            "input_tokens": INPUT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "prompts": {"per_concurrency": 1, "minimum": PROMPTS},
        }
    }
    config["matrix"] = {"concurrency": [1, 3]}
    config["node"] = {"selftest_streams": [1, 4]}
    config["figures"] = {"itl_by_concurrency": {}, "ttft_of_layouts": {}}
    return config


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Flow:
    """The small demo, run to its end with the repository's own serving environment."""
    flow = Flow(
        tmp_path_factory.mktemp("real"), Path("unused"), config=small_demo(), store=REPOSITORY / ".splitbench"
    )
    finished = flow.run(limit_s=900)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert flow.gone() == []
    return flow


def test_every_cell_is_measured_and_sound(done: Flow) -> None:
    cells = pq.read_table(done.results / "tables" / "cells.parquet").to_pandas()
    assert sorted(zip(cells["kind"], cells["concurrency"], strict=True)) == [
        ("aggregated", 1),
        ("aggregated", 3),
        ("pd", 1),
        ("pd", 3),
    ]
    assert set(cells["requests_completed"]) == {PROMPTS}
    assert set(cells["output_tokens_total"]) == {PROMPTS * OUTPUT_TOKENS}
    assert set(cells["input_tokens_total"]) == {PROMPTS * INPUT_TOKENS}
    checks = pq.read_table(done.results / "tables" / "checks.parquet").to_pandas()
    must = checks[checks["check"].isin(MUST_HOLD)]
    assert len(must) == 4 * 4 + 2
    assert set(must["outcome"]) == {"ok"}, must[must["outcome"] != "ok"].to_string()


def test_kv_moved_by_the_decoders_own_count(done: Flow) -> None:
    found = sorted(done.results.glob("cells/pd-*/*/*/*/metrics.json"))
    assert len(found) == 2
    for path in found:
        engines = json.loads(path.read_text(encoding="utf-8"))
        decoder = engines["decode-0"]
        by_source = {
            source: growth(
                decoder["before"], decoder["after"], "vllm:prompt_tokens_by_source_total", source=source
            )
            for source in ("external_kv_transfer", "local_compute", "local_cache_hit")
        }
        assert by_source["external_kv_transfer"] is not None
        assert by_source["external_kv_transfer"] >= PROMPTS * (INPUT_TOKENS - 1)
        assert (by_source["local_compute"] or 0) <= PROMPTS
        assert by_source["local_cache_hit"] in (0, None)
        moved = growth(decoder["before"], decoder["after"], "vllm:nixl_bytes_transferred_sum")
        model = json.loads(next(done.results.glob("models/*.json")).read_text(encoding="utf-8"))
        # Blocks move whole, so never fewer bytes than the tokens hold.
        assert moved is not None
        assert moved >= PROMPTS * (INPUT_TOKENS - 1) * model["kv_bytes_per_token"]


def test_the_client_was_measured_first_and_its_floor_is_on_the_page(done: Flow) -> None:
    (path,) = done.results.glob("environment/client-*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [row["streams"] for row in found["rows"]] == [1, 4]
    for row in found["rows"]:
        # A loaded machine makes the client late; only a wrong clock or token would make it late by seconds, or early.
        assert 0 < row["itl_error_p50_ms"] <= row["itl_error_p99_ms"] < 1000
        assert 0 < row["ttft_error_p50_ms"] < 1000
        assert row["merged_percent"] == 0
    assert path.stat().st_mtime < min(
        each.stat().st_mtime for each in done.results.glob("cells/*/*/*/*/cell.json")
    )
    assert 'id="floor"' in (done.results / "report.html").read_text(encoding="utf-8")
    checks = pq.read_table(done.results / "tables" / "checks.parquet").to_pandas()
    client = checks[checks["check"] == "client"]
    assert {dict(figures)["floor_streams"] for figures in client["figures"]} == {1.0, 4.0}


def test_layouts_get_the_same_prompts(done: Flow) -> None:
    records = [json.loads(path.read_text()) for path in done.results.glob("cells/*/*/*/*/record.json")]
    seeds: dict[str, set[int]] = {}
    for record in records:
        seeds.setdefault(record["cell_id"].split("/", 1)[1], set()).add(record["seed"])
    assert len(seeds) == 2
    assert all(len(found) == 1 for found in seeds.values())


def test_figures_and_page_are_there_and_a_second_run_does_nothing(done: Flow) -> None:
    names = ("itl_by_concurrency-some", "ttft_of_layouts-some")
    for name in names:
        for form in ("png", "pdf", "svg", "csv", "json"):
            assert (done.results / "figures" / f"{name}.{form}").stat().st_size > 500
    assert "pd-1+1core" in (done.results / "report.html").read_text(encoding="utf-8")
    assert done.planned() == {}
