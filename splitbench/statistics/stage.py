# SPDX-License-Identifier: Apache-2.0
"""The statistics stage as the workflow calls it: quantiles of every cell, the SLO, verdicts and claims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from splitbench.errors import PARTS, damage
from splitbench.experiment.claims import Claim
from splitbench.files import write_json
from splitbench.statistics.claims import judge_claims
from splitbench.statistics.pools import Pools
from splitbench.statistics.quantiles import quantiles, sample_gate
from splitbench.statistics.verdict import input_break_even, verdicts
from splitbench.tables import dataset
from splitbench.wording import explain

PERCENTILES = (50.0, 90.0, 99.0)


@damage(*PARTS)
def write_statistics(
    cells: Path,
    parts: Iterable[Path],
    slo: Mapping[str, Any],
    output: Path,
    *,
    margin_percent: float = 5.0,
    claims: Mapping[str, Any] | None = None,
    asymmetries: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write per cell its quantiles, the highest loads that keep the SLO, the verdicts and the judged claims.

    Args:
        cells: the cells table.
        parts: folders of the parts, in the order of that table.
        slo: the config's section.
        output: JSON.
        margin_percent: differences below it do not count.
        claims: the config's section.
        asymmetries: facts in which layouts differ, as `symmetry.json` holds them.
    """
    folders = list(parts)
    rows = pq.read_table(cells).to_pylist()
    percentiles = sorted({*PERCENTILES, float(slo["percentile"])})
    summaries = [_summary(row, part, percentiles) for row, part in zip(rows, folders, strict=True)]
    pools = Pools.from_parts(rows, folders)
    judged = judge_claims(
        {name: Claim.model_validate(claim) for name, claim in (claims or {}).items()}, pools, margin_percent
    )
    found = verdicts(pools, slo, margin_percent, asymmetries)
    for verdict in found:
        verdict["sentence"] = explain(verdict, "en")
    write_json(
        output,
        {
            "slo": dict(slo),
            "margin_percent": margin_percent,
            "verdicts": found,
            "break_even_input": input_break_even(found, pools),
            "claims": judged,
            "cells": summaries,
            "highest_load": highest_load(summaries, slo),
        },
    )


def _summary(row: Mapping[str, Any], part: Path, percentiles: list[float]) -> dict[str, Any]:
    requests = int(row["requests_completed"] or 0)
    summary: dict[str, Any] = {
        key: row[key]
        for key in ("cell_id", "layout", "workload", "concurrency", "restart", "repeat", "verdict")
    }
    summary["requests"] = requests
    itls = dataset.itl_values([part])
    summary["itls"] = len(itls)
    for metric, values in (("itl_ms", itls), ("ttft_ms", dataset.request_values([part], "ttft_ms"))):
        found = quantiles(values, [p / 100 for p in percentiles])
        summary[metric] = {
            f"p{p:g}": {
                "value": None if math.isnan(value) else round(float(value), 4),
                # Requests are what is independent, also where the metric is an ITL.
                "supported_by": requests,
                "needs": sample_gate(p / 100, requests).needs,
            }
            for p, value in zip(percentiles, found, strict=True)
        }
    return summary


def highest_load(summaries: Iterable[Mapping[str, Any]], slo: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The highest concurrency up to which every measured load keeps the SLO, per layout and workload.

    Cells that are invalid keep nothing. None where even the lowest load misses it, or no SLO is set.
    """
    limits = {metric: slo[metric] for metric in ("itl_ms", "ttft_ms") if slo.get(metric) is not None}
    percentile = f"p{slo['percentile']:g}"
    groups: dict[tuple[str, str], dict[int, bool]] = {}
    for cell in summaries:
        kept = cell["verdict"] != "invalid" and all(
            (value := cell[metric].get(percentile, {}).get("value")) is not None and value <= limit
            for metric, limit in limits.items()
        )
        loads = groups.setdefault((cell["layout"], cell["workload"]), {})
        loads[cell["concurrency"]] = loads.get(cell["concurrency"], True) and kept
    found = []
    for (layout, workload), loads in groups.items():
        highest = None
        for concurrency in sorted(loads):
            if not limits or not loads[concurrency]:
                break
            highest = concurrency
        found.append({"layout": layout, "workload": workload, "concurrency": highest})
    return found
