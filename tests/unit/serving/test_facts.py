# SPDX-License-Identifier: Apache-2.0
"""Engine facts, read from logs and metrics of real engines (CPU: vLLM 0.32, GPU: 0.26) and from /server_info."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitbench.serving.fact_rules import RULES
from splitbench.serving.facts import fact_rows, read_facts
from splitbench.serving.facts import read_start_of_log as text_of

ENGINES = Path(__file__).parents[2] / "fixtures" / "engines"
RESULTS = Path(__file__).parents[3] / "docs" / "results.md"


def values(facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Facts that are known."""
    return {name: fact["value"] for name, fact in facts.items() if fact["value"] is not None}


def test_an_engine_on_cpu_states_itself_in_log_and_metrics() -> None:
    metrics = (ENGINES / "decode-after.metrics").read_text()
    facts = read_facts(log=text_of(ENGINES / "decode.log"), metrics=metrics)
    assert values(facts) == {
        "vllm_version": "0.32.0",
        "model": "tiny",
        "served_model_name": "m",
        "dtype": "float32",
        "kv_cache_dtype": "auto",
        "max_model_len": 1024,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "data_parallel": 1,
        "enforce_eager": True,
        "cuda_graphs": "none",
        "prefix_caching": False,
        "chunked_prefill": True,
        "attention_backend": "CPU_ATTN",
        "model_runner": "V1",
        "front_end": "python",
        "block_size": 128,
        "kv_cache_tokens": 87296,
        "kv_cache_blocks": 455,
        "gpu_memory_utilization": 0.92,
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_buffer_device": "cpu",
    }
    assert facts["block_size"]["source"] == "metrics"
    line = text_of(ENGINES / "decode.log").splitlines()[55]
    assert facts["attention_backend"]["source"] == "log:56"
    assert "CPU_ATTN" in line


def test_an_engine_on_a_gpu_states_graphs_budget_and_backend() -> None:
    facts = values(read_facts(log=text_of(ENGINES / "gpu-aggregated.log")))
    assert facts["vllm_version"] == "0.26.0"
    assert facts["dtype"] == "bfloat16"
    assert facts["attention_backend"] == "FLASH_ATTN"
    assert facts["model_runner"] == "V2"
    assert facts["max_num_batched_tokens"] == 8192
    assert facts["kv_cache_tokens"] == 839648
    assert facts["cuda_graphs"] == "full_and_piecewise"
    assert facts["enforce_eager"] is False
    assert facts["async_scheduling"] is True
    # The log says nothing of it while it is on, so neither do we.
    assert "hybrid_kv_manager" not in facts


def test_a_front_end_in_rust_is_seen() -> None:
    log = "INFO 12-01 Launching Rust frontend: vllm-rs serve\nINFO 12-01 Starting vLLM server on http://x"
    assert values(read_facts(log=log))["front_end"] == "rust"


def test_lmcache_switches_the_hybrid_manager_off() -> None:
    facts = values(read_facts(log=text_of(ENGINES / "gpu-lmcache.log")))
    assert facts["hybrid_kv_manager"] is False
    assert facts["lmcache_version"] == "0.5.2-gcd2c0d6a"


@pytest.mark.parametrize(
    ("mode", "name"), [(0, "none"), ([2, 1], "full_and_piecewise"), ("PIECEWISE", "piecewise")]
)
def test_the_configuration_goes_before_the_log(mode: Any, name: str) -> None:
    info = {
        "vllm_config": {
            "model_config": {"model": "/m", "dtype": "torch.float16", "enforce_eager": False},
            "scheduler_config": {"disable_hybrid_kv_cache_manager": False, "max_num_batched_tokens": 2048},
            "compilation_config": {"cudagraph_mode": mode},
            "kv_transfer_config": None,
        },
        "system_env": {"torch_version": "2.13.0+cpu"},
    }
    facts = read_facts(log=text_of(ENGINES / "gpu-aggregated.log"), server_info=info)
    known = values(facts)
    assert (known["dtype"], known["enforce_eager"]) == ("float16", False)
    assert known["hybrid_kv_manager"] is True
    assert known["max_num_batched_tokens"] == 2048
    assert known["torch_version"] == "2.13.0+cpu"
    assert known["cuda_graphs"] == name
    assert facts["max_num_batched_tokens"]["source"] == "server_info"
    assert facts["attention_backend"]["source"].startswith("log:")
    assert "kv_connector" not in known


def test_the_configuration_as_text_is_understood_too() -> None:
    info = {"vllm_config": "model='/m', dtype=torch.bfloat16, max_seq_len=4096, enforce_eager=True"}
    known = values(read_facts(log="", server_info=info))
    assert known == {"model": "m", "dtype": "bfloat16", "max_model_len": 4096, "enforce_eager": True}


@pytest.mark.parametrize("info", [None, [], {"vllm_config": None}, {"vllm_config": {"model_config": []}}])
def test_what_nobody_states_is_null_with_a_null_source(info: Any) -> None:
    facts = read_facts(log="x" * 1000, metrics="nonsense {", server_info=info)
    assert set(facts) == set(RULES)
    assert all(fact == {"value": None, "source": None} for fact in facts.values())


def test_rows_of_the_table_carry_numbers_and_texts() -> None:
    known = {
        "dtype": {"value": "float32", "source": "server_info"},
        "block_size": {"value": 128, "source": "metrics"},
        "enforce_eager": {"value": True, "source": "log:7"},
        "quantization": {"value": None, "source": None},
    }
    rows = fact_rows(
        {"format": 1, "engines": {"decode-0": {"role": "decode", "devices": [1], "facts": known}}}
    )
    assert [(row["fact"], row["value"], row["number"], row["evidence"]) for row in rows] == [
        ("dtype", "float32", None, "server_info"),
        ("block_size", "128", 128.0, "metrics"),
        ("enforce_eager", "true", 1.0, "log:7"),
        ("quantization", None, None, None),
    ]
    assert {(row["engine"], row["role"]) for row in rows} == {("decode-0", "decode")}


def test_every_fact_is_in_the_docs() -> None:
    text = RESULTS.read_text(encoding="utf-8")
    for name, rule in RULES.items():
        assert f"| `{name}` | {rule.meaning} |" in text


def test_a_real_server_info_states_what_its_log_leaves_out() -> None:
    info = json.loads((ENGINES / "decode-server-info.json").read_text(encoding="utf-8"))
    facts = read_facts(log=text_of(ENGINES / "decode.log"), server_info=info)
    known = values(facts)
    assert known["hybrid_kv_manager"] is True
    assert (known["max_num_batched_tokens"], known["max_num_seqs"]) == (2048, 128)
    assert (known["async_scheduling"], known["cuda_graphs"]) == (False, "none")
    assert (known["kv_cache_blocks"], known["block_size"], known["kv_cache_tokens"]) == (682, 128, 87296)
    assert known["torch_version"] == "2.13.0+cpu"
    assert {name for name, fact in facts.items() if fact["source"] is None} == {
        "lmcache_version",
        "quantization",
    }
