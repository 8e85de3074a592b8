# SPDX-License-Identifier: Apache-2.0
"""Verdicts and claims of made-up tables, as the statistics stage writes them."""

from __future__ import annotations

from typing import Any

from splitbench.experiment.claims import Claim
from splitbench.figures.gallery import Measured
from splitbench.statistics.claims import judge_claims
from splitbench.statistics.verdict import verdicts

CLAIMS: dict[str, Any] = {
    "tail-grows": {
        "says": "The aggregated tail grows.",
        "says_ja": "集約構成のテールは大きくなる。",
        "tests": [{"metric": "itl_ms", "relation": "grows", "workload": "long", "layout": "agg-tp4"}],
    },
    "pd-lower": {
        "says": "PD's mean ITL and TTFT are lower.",
        "tests": [
            {
                "metric": metric,
                "statistic": ["mean", "p50"],
                "relation": "lower",
                "workload": "long",
                "layout": "pd-tp2",
                "reference": "agg-tp4",
            }
            for metric in ("itl_ms", "ttft_ms")
        ],
    },
    "pd-slow": {
        "says": "PD's median ITL is above a second, and its TTFT has steps.",
        "tests": [
            {
                "metric": "itl_ms",
                "relation": "above",
                "threshold": 1000,
                "workload": "long",
                "layout": "pd-tp2",
            },
            {
                "metric": "ttft_ms",
                "relation": "stairs",
                "threshold": 3,
                "workload": "long",
                "layout": "pd-tp2",
            },
            {
                "metric": "itl_ms",
                "relation": "crosses",
                "between": [90, 99],
                "workload": "long",
                "layout": "pd-tp2",
                "reference": "agg-tp4",
            },
            {
                "metric": "itl_ms",
                "relation": "serves_no_more",
                "threshold": 30,
                "workload": "long",
                "layout": "pd-tp2",
                "reference": "agg-tp4",
            },
        ],
    },
}


def judged(measured: Measured, itl_ms: float | None = 30.0) -> dict[str, Any]:
    """Fields of a report: SLO, margin, verdicts and claims."""
    pools = measured.pools("long")
    slo = {"itl_ms": itl_ms, "ttft_ms": None, "percentile": 99.0}
    told = [{"layouts": ["agg-tp4", "pd-tp2"], "reason": "enforce_eager: agg-tp4 true, pd-tp2 false"}]
    claims = judge_claims({name: Claim.model_validate(one) for name, one in CLAIMS.items()}, pools, 5)
    return {
        "slo": "" if itl_ms is None else f"ITL {itl_ms:g} ms at P99",
        "margin_percent": 5.0,
        "verdicts": verdicts(pools, slo, 5, told),
        "claims": claims,
    }
