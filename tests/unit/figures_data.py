# SPDX-License-Identifier: Apache-2.0
"""Tables of a made-up experiment for the tests of figures and report: small, seeded, with a known effect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

LAYOUTS = {
    "agg-tp4": ("aggregated", None, 4),
    "agg-tp8": ("aggregated", None, 8),
    "pd-tp2": ("pd", "prefiller", 4),
    "pd-tp4": ("pd", "prefiller", 8),
}


def tables(
    *,
    layouts: tuple[str, ...] = tuple(LAYOUTS),
    loads: tuple[int, ...] = (1, 8, 32),
    repeats: int = 1,
    tokens: int = 40,
    invalid: tuple[tuple[str, int], ...] = (),
    first_token: str = "prefiller",
    requests_per_load: int = 12,
) -> dict[str, pd.DataFrame]:
    """Tables by name. Aggregated ITLs stall in a share of tokens that grows with load; PD ones do not.

    Cells in `invalid` (layout, concurrency) have half of their requests failed.
    """
    cells: list[dict[str, Any]] = []
    requests: list[pd.DataFrame] = []
    gaps: list[pd.DataFrame] = []
    checks: list[dict[str, Any]] = []
    for layout in layouts:
        kind, first, budget = LAYOUTS[layout]
        for load in loads:
            for restart in range(repeats):
                random = np.random.default_rng([sum(map(ord, layout)), load, restart])
                n = requests_per_load * load
                bad = (layout, load) in invalid
                ok = np.arange(n) % 2 == 0 if bad else np.ones(n, bool)
                itl = (5 + load / 20) * random.lognormal(0, 0.05, (n, tokens))
                if kind == "aggregated":
                    itl += (random.random((n, tokens)) < load / 400) * random.uniform(60, 200, (n, tokens))
                ttft = random.choice([100.0, 200.0, 300.0], n) * random.lognormal(0, 0.05, n)
                cell_id = f"{layout}-0a0a0a0a/long-0b0b0b0b/c{load}/{restart}-0"
                cells.append(
                    {
                        "cell_id": cell_id,
                        "layout": layout,
                        "kind": kind,
                        "first_token": first_token if first else None,
                        "budget_kind": "gpus",
                        "budget": budget,
                        "share": None,
                        "workload": "long",
                        "concurrency": load,
                        "request_rate": None,
                        "restart": restart,
                        "repeat": 0,
                        "verdict": "invalid" if bad else "ok",
                        "cell_digest": f"{len(cells):064x}",
                        "requests_asked": n,
                        "duration_s": n / load * (0.2 + itl.sum(1).mean() / 1000),
                    }
                )
                checks.append(
                    {
                        "cell_id": cell_id,
                        "check": "completion",
                        "outcome": "invalid" if bad else "ok",
                        "reason": f"{n - ok.sum()} of {n} requests failed" if bad else "",
                    }
                )
                requests.append(
                    pd.DataFrame(
                        {
                            "cell_id": cell_id,
                            "request": np.arange(n, dtype=np.int32),
                            "ok": ok,
                            "error": np.where(ok, None, "died"),
                            "start_s": np.arange(n) * 0.1,
                            "ttft_ms": np.where(ok, ttft, np.nan),
                            "second_token_ms": np.where(ok, ttft + itl[:, 0], np.nan),
                            "handoff_gap_ms": np.where(
                                ok & (first is not None), itl[:, 0] - np.median(itl, 1), np.nan
                            ),
                            "itl_p99_ms": np.where(ok, np.quantile(itl, 0.99, axis=1), np.nan),
                            "output_tokens": np.where(ok, tokens + 1, 0),
                            "e2e_ms": np.where(ok, ttft + itl.sum(1), np.nan),
                        }
                    )
                )
                gaps.append(
                    pd.DataFrame(
                        {
                            "cell_id": cell_id,
                            "request": np.repeat(np.arange(n, dtype=np.int32), tokens),
                            "position": np.tile(np.arange(1, tokens + 1, dtype=np.int32), n),
                            "itl_ms": itl.ravel(),
                            "ok": np.repeat(ok, tokens),
                        }
                    )
                )
    return {
        "cells": pd.DataFrame(cells),
        "requests": pd.concat(requests, ignore_index=True),
        "tokens": pd.concat(gaps, ignore_index=True),
        "checks": pd.DataFrame(checks),
    }


def watched(cell_id: str) -> pd.DataFrame:
    """Telemetry of a cell: one metric of an engine, one of the client, one that stands still."""
    time = np.arange(20.0)
    names = [("engine:decode0", "running_requests"), ("client", "cpu_percent"), ("host", "still")]
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "time_s": time,
                    "source": source,
                    "metric": metric,
                    "value": 3.0 if metric == "still" else time % 7 + len(cell_id) % 3,
                }
            )
            for source, metric in names
        ],
        ignore_index=True,
    )
