# SPDX-License-Identifier: Apache-2.0
"""Service level objectives: which requests meet them, and at what share and rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.special import stdtrit

from splitbench.errors import UserError
from splitbench.statistics.clusters import clustered_share
from splitbench.statistics.quantiles import Floats, Interval

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Slo:
    """Limits that a request has to keep, all of them; None is no limit. Milliseconds.

    Attributes:
        ttft_ms, second_token_ms, tpot_ms, e2e_ms: limits on the request's own latencies.
        itl_ms: limit on the request's ITLs, by `itl_statistic`.
        itl_statistic: `max`, `p99` or `mean` of the request's ITLs.
        attainment: share of the requests that must keep them for a load to count as served.
    """

    ttft_ms: float | None = None
    second_token_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    itl_ms: float | None = None
    itl_statistic: Literal["max", "p99", "mean"] = "p99"
    attainment: float = 0.99

    @property
    def limits(self) -> dict[str, float]:
        """Limit by the column of the requests table that it applies to."""
        columns = {f.name: f.name for f in fields(self) if f.name.endswith("_ms")}
        columns["itl_ms"] = f"itl_{self.itl_statistic}_ms"
        found = {column: getattr(self, name) for name, column in columns.items()}
        return {column: float(limit) for column, limit in found.items() if limit is not None}


def attained(requests: pa.Table, slo: Slo) -> Bools:
    """Which requests keep every limit. A failed request misses; so does one whose latency is unknown.

    An answer of a single token has no ITL, no TPOT and no second token: it cannot break a limit on these.

    Args:
        requests: rows of the requests table.
        slo: the limits.

    Raises:
        UserError: a limit on a latency that the source did not record for any answered request.
    """
    ok = np.asarray(requests["ok"].to_numpy(zero_copy_only=False), dtype=np.bool_)
    met = ok.copy()
    tokens = _column(requests, "output_tokens")
    for column, limit in slo.limits.items():
        values = _column(requests, column)
        single = tokens == 1 if column not in ("ttft_ms", "e2e_ms") else np.zeros(len(ok), np.bool_)
        if ok.any() and np.isnan(values[ok & ~single]).all() and (ok & ~single).any():
            raise UserError(
                f"the SLO limits {column}, which this source has not recorded",
                where=f"requests: {column}",
                mend="measure with --save-detailed, or drop the limit",
            )
        with np.errstate(invalid="ignore"):
            met &= (values <= limit) | (single & np.isnan(values))
    return met


def _column(requests: pa.Table, name: str) -> Floats:
    return np.asarray(requests[name].to_numpy(zero_copy_only=False), dtype=np.float64)


@dataclass(frozen=True)
class Attainment:
    """How many requests keep the limits.

    Attributes:
        share: of all requests asked for, failures as misses.
        interval: of the share, with server starts (or runs, or requests) as what varies independently.
        met, requests: counts.
        level, units: what was taken as independent, and how many there are.
    """

    share: float
    interval: Interval
    met: int
    requests: int
    level: str
    units: int


def attainment(met: Bools, units: npt.NDArray[np.int64], level: str, confidence: float = 0.95) -> Attainment:
    """Share of requests that keep the limits, with its interval.

    Args:
        met: per request.
        units: the independent unit of each request (its server start, its run, or its own number).
        level: what a unit is.
        confidence: of the interval.
    """
    _, numbered = np.unique(units, return_inverse=True)
    count = int(numbered.max()) + 1 if len(numbered) else 0
    hits = np.bincount(numbered, weights=met, minlength=count).astype(np.float64)
    totals = np.bincount(numbered, minlength=count).astype(np.float64)
    share, interval = clustered_share(hits, totals, confidence)
    return Attainment(share, interval, int(met.sum()), len(met), level, count)


def mean_with_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, Interval]:
    """Mean of one figure per independent unit, with Student's t; unbounded with fewer than two units."""
    array = np.asarray(values, dtype=np.float64)
    if not len(array):
        return math.nan, Interval(-math.inf, math.inf, confidence)
    mean = float(array.mean())
    if len(array) < 2:
        return mean, Interval(-math.inf, math.inf, confidence)
    reach = float(stdtrit(len(array) - 1, (1 + confidence) / 2) * array.std(ddof=1) / math.sqrt(len(array)))
    return mean, Interval(mean - reach, mean + reach, confidence)
