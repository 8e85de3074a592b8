# SPDX-License-Identifier: Apache-2.0
"""Whether layouts that are compared differ in nothing but what they are compared for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
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
    "front_end",
    "async_scheduling",
)
# All engines of a layout together; it depends on how the model is spread, so small differences are let be.
POOL = "kv_cache_tokens"
POOL_DIFFERENCE_PERCENT = 25.0


@dataclass(frozen=True)
class Difference:
    """A fact in which two layouts differ.

    Attributes:
        layouts: their names.
        fact: its name.
        values: each layout's value or values, in that order.
    """

    layouts: tuple[str, str]
    fact: str
    values: tuple[str, str]

    @property
    def reason(self) -> str:
        """The difference in words."""
        told = (f"{arm} {value}" for arm, value in zip(self.layouts, self.values, strict=True))
        return f"{self.fact}: {', '.join(told)}"


def differences(arms: Mapping[str, Mapping[str, Facts]]) -> list[Difference]:
    """Every fact in which two layouts differ, pair by pair; a fact that one of them does not state is no difference.

    Args:
        arms: facts by layout and engine.
    """
    found = []
    for one, other in combinations(arms, 2):
        for name in COMPARED:
            values = tuple("/".join(sorted(_values(arms[arm], name))) for arm in (one, other))
            if all(values) and values[0] != values[1]:
                found.append(Difference((one, other), name, (values[0], values[1])))
        pools = [sum(_sizes(arms[arm])) for arm in (one, other)]
        if all(pools) and max(pools) > min(pools) * (1 + POOL_DIFFERENCE_PERCENT / 100):
            found.append(Difference((one, other), POOL, (f"{pools[0]:,.0f}", f"{pools[1]:,.0f}")))
    return found


def symmetry(arms: Mapping[str, Mapping[str, Facts]]) -> Check:
    """Compare engines' facts between the layouts of one budget.

    Args:
        arms: facts by layout and engine; an engine may lack facts that its version does not state.

    Returns:
        `warn` with every fact that differs and its values by layout, else `ok`.
    """
    compared = sum(any(_values(engines, name) for engines in arms.values()) for name in COMPARED)
    different: dict[str, dict[str, str]] = {}
    for each in differences(arms):
        different.setdefault(each.fact, {}).update(zip(each.layouts, each.values, strict=True))
    figures: dict[str, Any] = {"facts_compared": compared, "facts_different": len(different)}
    if not compared:
        return Check("symmetry", "warn", "no engine stated its settings, so nothing was compared", figures)
    if different:
        told = (
            f"{fact}: {', '.join(f'{arm} {value}' for arm, value in values.items())}"
            for fact, values in different.items()
        )
        return Check("symmetry", "warn", "; ".join(told), figures)
    return Check("symmetry", "ok", f"{compared} settings are the same in {', '.join(arms)}", figures)


def _sizes(engines: Mapping[str, Facts]) -> list[float]:
    return [float(facts[POOL]) for facts in engines.values() if facts.get(POOL) is not None]


def facts_of(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Facts by engine from the content of an `engine_facts.json`."""
    return {
        engine: {name: fact["value"] for name, fact in entry["facts"].items()}
        for engine, entry in content["engines"].items()
    }


def _values(engines: Mapping[str, Facts], name: str) -> set[str]:
    found = (facts.get(name) for facts in engines.values())
    return {value if isinstance(value, str) else json.dumps(value) for value in found if value is not None}
