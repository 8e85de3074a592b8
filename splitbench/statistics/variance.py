# SPDX-License-Identifier: Apache-2.0
"""Where the spread comes from: server starts, runs, or requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitbench.statistics.quantiles import Floats


@dataclass(frozen=True)
class VarianceSplit:
    """Variance components of one request-level metric, in the metric's unit squared.

    Attributes:
        restart, run, request: the components; None where there is only one of them per parent, so it cannot
            be told from the level below. A negative estimate is 0.
        restarts, runs, requests: how many there are.
    """

    restart: float | None
    run: float | None
    request: float | None
    restarts: int
    runs: int
    requests: int

    @property
    def shares(self) -> dict[str, float]:
        """Share of each known component in their sum; empty if all are 0."""
        known = {k: v for k in ("restart", "run", "request") if (v := getattr(self, k)) is not None}
        total = sum(known.values())
        return {k: v / total for k, v in known.items()} if total > 0 else {}


def variance_split(
    values: Floats, restarts: npt.NDArray[np.int64], runs: npt.NDArray[np.int64]
) -> VarianceSplit:
    """Nested analysis of variance, also for unequal numbers of runs and requests (Henderson's method 1).

    Args:
        values: one per request, without NaN.
        restarts: the server start of each request.
        runs: the run of each request; numbers may repeat between server starts.
    """
    top, restart_of = np.unique(restarts, return_inverse=True)
    pairs, run_of = np.unique(np.stack([restart_of, runs]), axis=1, return_inverse=True)
    run_of = run_of.ravel()
    parent = pairs[0]
    n_run = np.bincount(run_of).astype(np.float64)
    n_restart = np.bincount(restart_of).astype(np.float64)
    n, count_runs, count_restarts = float(len(values)), len(n_run), len(top)
    empty = VarianceSplit(None, None, None, count_restarts, count_runs, len(values))
    if not len(values):
        return empty
    grand = values.mean()
    mean_run = np.bincount(run_of, weights=values) / n_run
    mean_restart = np.bincount(restart_of, weights=values) / n_restart
    within = float(np.sum((values - mean_run[run_of]) ** 2))
    between_runs = float(np.sum(n_run * (mean_run - mean_restart[parent]) ** 2))
    between_restarts = float(np.sum(n_restart * (mean_restart - grand) ** 2))
    free = len(values) - count_runs, count_runs - count_restarts, count_restarts - 1
    request = within / free[0] if free[0] else None
    # How often each component enters the sums of squares, from the group sizes.
    run_in_restart = float(np.sum(np.bincount(parent, weights=n_run**2) / n_restart))
    run = restart = None
    if free[1] and request is not None:
        run = max(0.0, (between_runs - free[1] * request) / (n - run_in_restart))
    if free[2] and request is not None:
        run_share = run_in_restart - float(np.sum(n_run**2)) / n
        restart_share = n - float(np.sum(n_restart**2)) / n
        restart = max(0.0, (between_restarts - free[2] * request - run_share * (run or 0.0)) / restart_share)
    return VarianceSplit(restart, run, request, count_restarts, count_runs, len(values))
