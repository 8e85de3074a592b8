# SPDX-License-Identifier: Apache-2.0
"""Whether layouts that are compared differ in nothing but what they are compared for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from splitbench.measuring.evidence import Check

Facts = Mapping[str, Any]
"""One engine's facts, by name."""

# Facts that decide latencies and have nothing to do with disaggregation.
COMPARED = (
    "vllm_version",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "enforce_eager",
    "cuda_graphs",
    "prefix_caching",
    "chunked_prefill",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "block_size",
    "attention_backend",
    "hybrid_kv_manager",
    "model_runner",
    "async_scheduling",
)
# Depends on how the model is spread, so it is compared per budget only where it differs by more than this share.
POOL = "kv_cache_tokens"
POOL_DIFFERENCE_PERCENT = 25.0


def symmetry(arms: Mapping[str, Mapping[str, Facts]]) -> Check:
    """Compare engines' facts between the layouts of one budget.

    Args:
        arms: facts by layout and engine; an engine may lack facts that its version does not state.

    Returns:
        `warn` with every fact that differs and its values by layout, else `ok`.
    """
    different: list[str] = []
    for name in COMPARED:
        values = {arm: _values(engines, name) for arm, engines in arms.items()}
        known = {arm: found for arm, found in values.items() if found}
        if len({frozenset(found) for found in known.values()}) > 1:
            shown = ", ".join(f"{arm} {'/'.join(sorted(found))}" for arm, found in known.items())
            different.append(f"{name}: {shown}")
    pools = {
        arm: sum(float(facts[POOL]) for facts in engines.values() if facts.get(POOL) is not None)
        for arm, engines in arms.items()
    }
    sizes = [size for size in pools.values() if size]
    if len(sizes) > 1 and max(sizes) > min(sizes) * (1 + POOL_DIFFERENCE_PERCENT / 100):
        shown = ", ".join(f"{arm} {size:,.0f}" for arm, size in pools.items() if size)
        different.append(f"KV cache in tokens, all engines: {shown}")
    compared = sum(any(_values(engines, name) for engines in arms.values()) for name in COMPARED)
    figures: dict[str, Any] = {"facts_compared": compared, "facts_different": len(different)}
    if not compared:
        return Check("symmetry", "warn", "no engine stated its settings, so nothing was compared", figures)
    if different:
        return Check("symmetry", "warn", "; ".join(different), figures)
    return Check("symmetry", "ok", f"{compared} settings are the same in {', '.join(arms)}", figures)


def facts_of(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Facts by engine from the content of an `engine_facts.json`."""
    return {
        engine: {name: fact["value"] for name, fact in entry["facts"].items()}
        for engine, entry in content["engines"].items()
    }


def _values(engines: Mapping[str, Facts], name: str) -> set[str]:
    found = (facts.get(name) for facts in engines.values())
    return {value if isinstance(value, str) else json.dumps(value) for value in found if value is not None}
