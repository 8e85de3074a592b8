# SPDX-License-Identifier: Apache-2.0
"""Prefill-decode over LMCache's server, real engines on CPU.

Its environment (3.5 GB) is no part of an ordinary test run: SPLITBENCH_TEST_LMCACHE=build makes it from its lock, and
a path names the interpreter of one that is there.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from splitbench.measuring.metrics import growth
from tests.fakes.layouts import free_ports
from tests.workflow.flow import REPOSITORY, Flow

WANTED = os.environ.get("SPLITBENCH_TEST_LMCACHE", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not WANTED, reason="SPLITBENCH_TEST_LMCACHE says with which environment"),
]

PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS = 6, 256, 12


def config() -> dict[str, Any]:
    """The experiment's layout over LMCache's server, one load, few prompts."""
    file = REPOSITORY / "config" / "experiments" / "cpu-lmcache-mp.yaml"
    found: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    found["layouts"] = {name: each for name, each in found["layouts"].items() if each["kind"] == "pd"}
    found["node"] = {"base_port": free_ports(12)[0]}
    prompts = {"per_concurrency": 1, "minimum": PROMPTS}
    found["workloads"] = {
        "some": {"input_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS, "prompts": prompts}
    }
    found["matrix"] = {"concurrency": [2]}
    if WANTED != "build":
        found["stack"] = {"name": "given", "python": WANTED, "packages": {"vllm": "0.32.0+cpu"}}
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Flow:
    """The experiment, run to its tables."""
    store = Path(os.environ.get("SPLITBENCH_STORE", REPOSITORY / ".splitbench")).resolve()
    flow = Flow(tmp_path_factory.mktemp("lmcache"), Path("unused"), config=config(), store=store)
    finished = flow.run("tables", limit_s=1500)
    logs = "\n".join(
        f"{path}: {path.read_text()[-3000:]}" for path in flow.results.glob("logs/sessions/*/*/lmcache.log")
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr + logs
    assert flow.gone() == []
    return flow


def test_kv_comes_from_the_server(done: Flow) -> None:
    (path,) = done.results.glob("cells/*/*/*/*/metrics.json")
    engines = json.loads(path.read_text(encoding="utf-8"))
    decoder = engines["decode-0"]
    moved, computed = (
        growth(decoder["before"], decoder["after"], "vllm:prompt_tokens_by_source_total", source=source)
        or 0.0
        for source in ("external_kv_transfer", "local_compute")
    )
    # Whole chunks of 128 tokens move; of the last one a token may be left for the decoder to compute.
    assert moved >= PROMPTS * (INPUT_TOKENS - 1)
    assert computed <= PROMPTS
    (log,) = done.results.glob("logs/sessions/*/*/lmcache.log")
    loaded = sum(
        int(match[1]) for match in re.finditer(r"Retrieved (\d+) tokens", log.read_text(encoding="utf-8"))
    )
    assert loaded >= moved


def test_the_cell_is_sound(done: Flow) -> None:
    checks = pq.read_table(done.results / "tables" / "checks.parquet").to_pandas()
    outcome = dict(zip(checks["check"], checks["outcome"], strict=True))
    assert {
        name: outcome[name] for name in ("completion", "tokens", "fresh-prompts", "kv-moved")
    } == dict.fromkeys(("completion", "tokens", "fresh-prompts", "kv-moved"), "ok"), checks.to_string()
    (facts,) = done.results.glob("cells/*/*/*/*/engine_facts.json")
    for engine in json.loads(facts.read_text(encoding="utf-8"))["engines"].values():
        assert engine["facts"]["kv_connector"]["value"] == "LMCacheMPConnector"
