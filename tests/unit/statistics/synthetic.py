# SPDX-License-Identifier: Apache-2.0
"""Cells with known latencies, for verdicts and claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from splitbench.statistics.clusters import Clustered, clustered
from splitbench.statistics.pools import Pools

ARMS = {
    "agg4": ("aggregated", 4, None),
    "pd4": ("pd", 4, "decoder"),
    "agg8": ("aggregated", 8, None),
    "pd8": ("pd", 8, "prefiller"),
    "pd4-shared": ("pd", 4, "decoder"),
}
SHARES = {"pd4-shared": "mps 50+50"}
Values = Callable[[str, str, float, str, np.random.Generator, int], np.ndarray]


def pools(
    values: Values,
    *,
    layouts: Sequence[str] = ("agg4", "pd4"),
    workloads: Sequence[tuple[str, int]] = (("long", 8192),),
    loads: Sequence[int] = (1, 8, 32),
    restarts: int = 3,
    repeats: int = 1,
    requests: int = 200,
    invalid: Sequence[tuple[str, int]] = (),
) -> Pools:
    """Cells of `requests` requests; `values(workload, layout, load, metric, rng, n)` gives each run's latencies."""
    rows: list[dict[str, Any]] = []
    runs: dict[str, tuple[str, str, int, int]] = {}
    for layout in layouts:
        kind, budget, first = ARMS[layout]
        for workload, tokens in workloads:
            for load in loads:
                for restart in range(restarts):
                    for repeat in range(repeats):
                        cell_id = f"{layout}/{workload}/c{load}/{restart}-{repeat}"
                        runs[cell_id] = (workload, layout, load, restart)
                        rows.append(
                            {
                                "cell_id": cell_id,
                                "layout": layout,
                                "kind": kind,
                                "budget_kind": "gpus",
                                "budget": budget,
                                "share": SHARES.get(layout),
                                "first_token": first,
                                "workload": workload,
                                "input_tokens_asked": tokens,
                                "output_tokens_asked": 128,
                                "concurrency": load,
                                "restart": restart,
                                "repeat": repeat,
                                "verdict": "invalid" if (layout, load) in invalid else "ok",
                            }
                        )

    def source(ids: Sequence[str], metric: str) -> Clustered:
        parts, labels = [], []
        several = len({runs[cell_id][3] for cell_id in ids}) > 1
        for number, cell_id in enumerate(ids):
            workload, layout, load, restart = runs[cell_id]
            rng = np.random.default_rng([sum(map(ord, cell_id + metric)), number])
            found = values(workload, layout, load, metric, rng, requests)
            parts.append(found)
            if len(ids) < 2:
                labels.append(np.arange(len(found)))
            else:
                labels.append(np.full(len(found), restart if several else number))
        level = "restart" if several else "run" if len(ids) > 1 else "request"
        return clustered(np.concatenate(parts), np.concatenate(labels), level)

    return Pools(rows, source)


def around(middle: float, spread: float = 0.05) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Log-normal latencies around a middle."""
    return lambda rng, n: middle * rng.lognormal(0, spread, n)
