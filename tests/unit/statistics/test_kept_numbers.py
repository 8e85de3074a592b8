# SPDX-License-Identifier: Apache-2.0
"""Numbers to the last digit that counts, on fixed samples: a changed constant or sign anywhere shows here.

What these numbers should be follows from the tests beside this one; here they are only kept. Made again with
`python tests/unit/statistics/test_kept_numbers.py`, and then read.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from synthetic import around, pools

from splitbench.experiment.claims import Claim
from splitbench.statistics import quantiles as q
from splitbench.statistics.bootstrap import (
    crossing_quantile,
    interval_of_draws,
    paired_differences,
    paired_mean_difference,
    unit_weights,
)
from splitbench.statistics.capacity import Run, break_even, cost_per_million, goodput, token_goodput
from splitbench.statistics.claims import judge_claims
from splitbench.statistics.clusters import clustered, clustered_quantile, clustered_share, counts_below
from splitbench.statistics.compare import finite, level_of, statistic_of
from splitbench.statistics.relations import decided
from splitbench.statistics.slo import attainment, mean_with_interval
from splitbench.statistics.stage import highest_load
from splitbench.statistics.steps import count_steps
from splitbench.statistics.variance import variance_split
from splitbench.statistics.verdict import input_break_even, verdicts
from splitbench.wording import advise, explain

KEPT = Path(__file__).parents[2] / "fixtures" / "statistics" / "kept.json"


def plain(value: Any) -> Any:
    """JSON of anything, with infinities and NaN as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else str(value)
    return value


def sample(seed: int, units: int, middle: float, level: str = "restart", n: int = 60) -> Any:
    rng = np.random.default_rng(seed)
    shifts = middle * rng.lognormal(0, 0.1, units)
    values = np.concatenate([shift * rng.lognormal(0, 0.4, n) for shift in shifts])
    return clustered(values, np.repeat(np.arange(units), n), level)


def of_samples() -> dict[str, Any]:
    a, b = sample(1, 4, 20), sample(2, 4, 17)
    one, many = sample(3, 1, 20), sample(4, 240, 18, "request", 1)
    values = np.sort(np.random.default_rng(5).lognormal(3, 1, 400))
    ps = [0.001, 0.025, 0.1, 0.5, 0.9, 0.99]
    rng = np.random.default_rng(6)
    stairs = 200 * (1 + np.arange(160) % 4) + rng.normal(0, 14, 160)
    restarts, runs = (
        np.repeat([0, 1, 2], [40, 30, 50]),
        np.repeat([0, 1, 0, 1, 0, 1], [10, 30, 15, 15, 25, 25]),
    )
    spread = 100 + 9 * restarts + 4 * runs + rng.normal(0, 3, 120)
    return {
        "differences": paired_differences(a, b, [0.5, 0.9, 0.99]),
        "unpaired": paired_differences(a, many, [0.5, 0.9]),
        "one unit": paired_differences(a, one, [0.5]),
        "means": [
            paired_mean_difference(a, b),
            paired_mean_difference(many, a),
            paired_mean_difference(a, one),
        ],
        "crossing": [
            crossing_quantile(x, y)
            for x, y in ((a, b), (many, b), (sample(7, 3, 20), sample(8, 3, 20)), (one, a))
        ],
        "weights": [unit_weights(3, 4, 9), unit_weights(1, 2)],
        "spread": [interval_of_draws(2.0, np.array([1.0, 2.0, 4.0]), n, 0.9) for n in (1, 2, 5)],
        "clustered": [clustered_quantile(s, p) for s in (a, one, many) for p in (0.1, 0.5, 0.9, 0.99)],
        "shares": [clustered_share(*counts_below(s, 21.0)) for s in (a, b, one, many)],
        "texts": [clustered_quantile(s, p).text for s in (a, one) for p in (0.01, 0.5, 0.999)],
        "quantiles": [q.quantiles(values, ps), q.sorted_quantiles(values, ps)],
        "streamed": q.quantiles(lambda: np.array_split(values, 3), ps),
        "intervals": [q.quantile_interval(values, p, c) for p in ps for c in (0.5, 0.95)],
        "readings": [q.read_quantile(values[:n], p).text for n in (3, 40, 400) for p in ps],
        "needed": [q.needed(p, c) for p in ps for c in (0.5, 0.95, 0.99)],
        "ecdf": [q.ecdf_at(values, np.array([1.0, 20.0, 90.0])), q.survival(values[:5])],
        "steps": [count_steps(stairs), count_steps(values[::5]), count_steps(stairs[:9])],
        "variance": [
            (split, split.shares)
            for split in (
                variance_split(spread, restarts, runs),
                variance_split(spread[:40], restarts[:40], runs[:40]),
                variance_split(spread, restarts, restarts),
                variance_split(spread, restarts, np.arange(120)),
                variance_split(spread[:0], restarts[:0], runs[:0]),
            )
        ],
        "mean": [mean_with_interval(v, c) for v in ([], [3.0], [1.0, 2.0, 4.0]) for c in (0.5, 0.95)],
        "attained": [
            attainment(values > 9, np.arange(400) // n, "run", c) for n in (1, 100, 400) for c in (0.9, 0.95)
        ],
        "names": [level_of("p99.5"), level_of("mean"), statistic_of(99.5), finite(1 / 3), finite(math.inf)],
        "decided": [
            decided(v, v - 1, v + 1, lambda x: x > 0, s) for v in (-2, 0, 2, math.nan) for s in (True, False)
        ],
    }


def of_money() -> dict[str, Any]:
    runs = [Run(0, 10.0, 50, 5000), Run(0, 20.0, 40, 4100), Run(1, 10.0, 61, 6000), Run(2, 0.0, 1, 1)]
    lines = [[0.3, 0.1, -0.1, -0.3], [0.3, 0.0, -0.2, -0.3], [-0.1, -0.1, -0.1, 0.0], [-0.2, -0.1, 0.1, 0.2]]
    around_it = [[q.Interval(c - w, c + w / 2) for c in line] for line in lines for w in (0.05, 0.3)]
    return {
        "rates": [
            f(runs[:k], 4, c) for f in (goodput, token_goodput) for k in (1, 2, 3, 4) for c in (0.9, 0.95)
        ],
        "cost": [cost_per_million(runs[:k], 4, 2.5) for k in (1, 3)],
        "even": [break_even([4, 8, 16, 32], lines[k // 2], ends) for k, ends in enumerate(around_it)],
    }


CLAIM = {"workload": "long", "layout": "pd4", "metric": "itl_ms", "statistic": ["p50", "p99", "mean"]}
PAIR = CLAIM | {"reference": "agg4"}
CLAIMS: dict[str, Any] = {
    "at_most": [
        CLAIM | {"relation": "at_most", "threshold": 21},
        CLAIM | {"relation": "above", "threshold": 30},
    ],
    "grows": [CLAIM | {"relation": "grows"}, CLAIM | {"relation": "grows", "layout": "agg4"}],
    "lower": [PAIR | {"relation": "lower", "by_percent": 10}, PAIR | {"relation": "higher", "agree": "most"}],
    "not": [PAIR | {"relation": "not_lower"}, PAIR | {"relation": "not_higher", "concurrency": 8}],
    "serves": [PAIR | {"relation": "serves_no_more", "threshold": 22}],
    "crosses": [PAIR | {"relation": "crosses", "between": [60, 95], "statistic": "p99"}],
    "stairs": [CLAIM | {"relation": "stairs", "threshold": 3, "layout": "agg4"}],
    "gain": [
        PAIR
        | {"relation": "smaller_gain", "workload": "short", "other_workload": "long", "metric": "ttft_ms"}
    ],
}


def latencies(workload: str, layout: str, load: float, metric: str, rng: Any, n: int) -> np.ndarray:
    middle = 14 + load * (0.3 if layout.startswith("pd") else 0.6) + (6 if workload == "short" else 0)
    middle *= rng.lognormal(0, 0.02)
    if metric == "ttft_ms" and layout == "agg4":
        return middle * (1 + np.arange(n) % 3) + rng.normal(0, 1, n)
    return around(middle, 0.1 if layout.startswith("pd") else 0.2)(rng, n)


def of_cells() -> dict[str, Any]:
    kinds = [("long", 8192), ("short", 1024)]
    found = pools(latencies, workloads=kinds, requests=130, invalid=[("pd4", 8)])
    whole = pools(latencies, workloads=kinds, requests=70, repeats=2, restarts=2, loads=(1, 32))
    others = pools(latencies, layouts=("agg8", "pd8"), requests=130, loads=(8,))
    slos = [{"itl_ms": 25, "ttft_ms": t, "percentile": p} for t, p in ((None, 99.0), (60, 90.0))]
    told = [{"layouts": ["agg4", "pd4"], "reason": "x"}, {"budget": "8 GPUs", "reason": "y"}]
    judged = [
        verdict for p in (found, whole, others) for slo in slos for verdict in verdicts(p, slo, 5, told)
    ]
    summaries = [
        {
            "layout": layout,
            "workload": "w",
            "concurrency": load,
            "verdict": verdict,
            "itl_ms": {"p99": {"value": value}},
            "ttft_ms": {},
        }
        for layout, load, verdict, value in (
            ("a", 1, "ok", 9.0),
            ("a", 2, "warn", 10.0),
            ("a", 4, "ok", 10.1),
            ("a", 8, "ok", 1.0),
            ("b", 1, "invalid", 1.0),
            ("b", 2, "ok", 1.0),
            ("c", 1, "ok", 1.0),
            ("c", 1, "ok", 99.0),
            ("d", 1, "ok", None),
        )
    ]
    claims = {name: Claim.model_validate({"says": "x", "tests": tests}) for name, tests in CLAIMS.items()}
    return {
        "verdicts": judged,
        "words": [
            f(verdict, language) for verdict in judged for f in (explain, advise) for language in ("en", "ja")
        ],
        "input": input_break_even(verdicts(whole, slos[0], 5), whole),
        "claims": [judge_claims(claims, p, 5) for p in (found,)],
        "highest": [highest_load(summaries, {"itl_ms": limit, "percentile": 99.0}) for limit in (10.0, None)],
    }


PARTS = {"samples": of_samples, "money": of_money, "cells": of_cells}


def differing(kept: Any, found: Any, at: str = "") -> list[str]:
    """Where two values of JSON differ by more than the last digits."""
    if isinstance(kept, dict) and isinstance(found, dict) and kept.keys() == found.keys():
        return [line for key in kept for line in differing(kept[key], found[key], f"{at}.{key}")]
    if isinstance(kept, list) and isinstance(found, list) and len(kept) == len(found):
        return [
            line
            for k, pair in enumerate(zip(kept, found, strict=True))
            for line in differing(*pair, f"{at}[{k}]")
        ]
    numbers = [one for one in (kept, found) if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(numbers) == 2:
        return [] if found == pytest.approx(kept, rel=1e-6, abs=1e-9) else [f"{at}: {kept} is now {found}"]
    return [] if kept == found and type(kept) is type(found) else [f"{at}: {kept} is now {found}"]


@pytest.mark.parametrize("part", PARTS)
def test_numbers_are_those_that_were_kept(part: str) -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))[part]
    assert differing(kept, json.loads(json.dumps(plain(PARTS[part]())))) == []


if __name__ == "__main__":
    KEPT.parent.mkdir(exist_ok=True)
    made = {name: plain(part()) for name, part in PARTS.items()}
    KEPT.write_text(json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
