# SPDX-License-Identifier: Apache-2.0
"""PD wins, loses, or undecided: per workload and budget, at the user's SLO, with what it rests on.

The verdict is taken at the *deciding load*: the highest load at which at least one of the two layouts still keeps
the SLO (without an SLO the highest that both have valid cells at). There, each latency that the SLO limits is
compared between the layouts; a difference counts if its whole interval lies beyond the practical margin. Where
latencies disagree, a layout that surely keeps the SLO beats one that surely misses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitbench.serving.plan import Budget
from splitbench.statistics.capacity import BreakEven, break_even
from splitbench.statistics.compare import Compared, compared, finite, statistic_of
from splitbench.statistics.pools import Arm, Pools
from splitbench.statistics.quantiles import Interval

REPEATS = 3
RESTARTS = 2
_LIMITED = ("itl_ms", "ttft_ms")
Fact = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """The SLO as pooled samples keep it: each percentile at or below its limit.

    Attributes:
        limits: ms by metric.
        percentile: in percent.
    """

    limits: Mapping[str, float]
    percentile: float

    @classmethod
    def from_config(cls, slo: Mapping[str, Any]) -> Limits:
        """From the config's section."""
        limits = {metric: float(slo[metric]) for metric in _LIMITED if slo.get(metric) is not None}
        return cls(limits, float(slo["percentile"]))

    @property
    def metrics(self) -> list[str]:
        """What is compared: what the SLO limits, or both latencies where it limits none."""
        return list(self.limits) or list(_LIMITED)


def verdicts(
    pools: Pools,
    slo: Mapping[str, Any],
    margin_percent: float,
    asymmetries: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """The verdict of every PD layout against every other layout of its budget, for every workload.

    Args:
        pools: the cells.
        slo: the config's section.
        margin_percent: smaller differences do not count.
        asymmetries: what differs between engines of compared layouts, each with `reason` and either `layouts`
            (names) or `budget` (as in "4 GPUs"); those of a pair are put beside its verdict.
    """
    limits = Limits.from_config(slo)
    found = []
    for workload in pools.workloads:
        for reference, layout in pairs(pools, workload):
            case = _Case(pools, workload, reference, layout, limits, margin_percent / 100)
            told = [dict(entry) for entry in asymmetries if _concerns(entry, reference, layout)]
            told += shares(reference, layout)
            found.append(case.record() | {"asymmetries": told})
        pools.release(workload)
    return found


def _concerns(entry: Mapping[str, Any], reference: Arm, layout: Arm) -> bool:
    if "layouts" in entry:
        return {reference.name, layout.name} <= set(entry["layouts"])
    return bool(entry["budget"] == str(Budget(kind=layout.budget_kind, count=layout.budget)))


def shares(*arms: Arm) -> list[dict[str, Any]]:
    """What to say beside a comparison of layouts that do not have their accelerators in the same way."""
    if len({arm.share for arm in arms}) == 1:
        return []
    how = "; ".join(f"{arm.name} {arm.share or 'an engine per accelerator'}" for arm in arms)
    return [{"layouts": [arm.name for arm in arms], "reason": f"share of the accelerators: {how}"}]


def pairs(pools: Pools, workload: str) -> list[tuple[Arm, Arm]]:
    """Budget-matched pairs of a workload: the reference, and the PD layout that is judged."""
    arms = [arm for arm in pools.arms.values() if pools.loads(workload, arm.name, valid=False)]
    return [
        (one, other)
        for other in arms
        for one in arms
        if other.kind == "pd"
        and one.kind != "pd"
        and (one.budget_kind, one.budget) == (other.budget_kind, other.budget)
    ]


def same_content(metric: str, *arms: Arm) -> str:
    """TTFTs compare only if the same engine sends the first token; else the time to second token stands in."""
    mixed = len({arm.first_token == "prefiller" for arm in arms}) > 1
    return "second_token_ms" if metric == "ttft_ms" and mixed else metric


@dataclass
class _Case:
    """One pair on one workload."""

    pools: Pools
    workload: str
    reference: Arm
    layout: Arm
    limits: Limits
    margin: float

    def __post_init__(self) -> None:
        names = self.reference.name, self.layout.name
        loads = [set(self.pools.loads(self.workload, name)) for name in names]
        every = [set(self.pools.loads(self.workload, name, valid=False)) for name in names]
        self.shared = sorted(loads[0] & loads[1])
        self.tested = sorted(every[0] & every[1])
        statistic = statistic_of(self.limits.percentile)
        self.metrics = [same_content(m, self.reference, self.layout) for m in self.limits.metrics]
        self.differences: dict[float, list[Compared]] = {}
        for load in self.shared:
            self.differences[load] = [
                one
                for metric in self.metrics
                if (one := compared(self.pools, self.workload, *names, load, metric, statistic)) is not None
            ]

    def keeps(self, arm: Arm, load: float) -> tuple[bool, bool, bool]:
        """Whether a layout keeps the SLO at a load: by its value; surely; surely not."""
        keeps = surely = True
        surely_not = False
        for metric, limit in self.limits.limits.items():
            p = self.limits.percentile / 100
            reading = self.pools.reading(self.workload, arm.name, load, metric, p)
            if reading is None or math.isnan(reading.value):
                return False, False, False
            keeps = keeps and reading.value <= limit
            surely = surely and reading.interval.high <= limit
            surely_not = surely_not or reading.interval.low > limit
        return keeps, surely, surely_not

    def highest(self, arm: Arm) -> float | None:
        """The highest load up to which every tested load keeps the SLO; None if the lowest does not."""
        best = None
        for load in self.pools.loads(self.workload, arm.name, valid=False):
            if not self.limits.limits or not self.keeps(arm, load)[0]:
                break
            best = load
        return best

    def deciding_load(self) -> float | None:
        if not self.limits.limits or not self.shared:
            return self.shared[-1] if self.shared else None
        kept = [
            load
            for load in self.shared
            if self.keeps(self.reference, load)[0] or self.keeps(self.layout, load)[0]
        ]
        return kept[-1] if kept else self.shared[0]

    def record(self) -> dict[str, Any]:
        load = self.deciding_load()
        outcome, reasons = self.judge(load)
        return {
            "workload": self.workload,
            "budget": {"kind": self.reference.budget_kind, "count": self.reference.budget},
            "reference": self.reference.name,
            "reference_kind": self.reference.kind,
            "shares": {arm.name: arm.share for arm in (self.reference, self.layout)},
            "layout": self.layout.name,
            "load": load,
            "outcome": outcome,
            "reasons": reasons,
            "next": self.next(load, outcome, reasons),
            "margin_percent": finite(100 * self.margin),
            "percentile": self.limits.percentile,
            "differences": [
                one.record() | {"finding": one.finding(self.margin), "deciding": at == load}
                for at, found in self.differences.items()
                for one in found
            ],
            "highest_load": {arm.name: self.highest(arm) for arm in (self.reference, self.layout)},
            "keeps_slo": {
                arm.name: None if load is None or not self.limits.limits else self.keeps(arm, load)[0]
                for arm in (self.reference, self.layout)
            },
            "repeats": self.repeats(load),
            "break_even": [self.break_even(metric) for metric in self.metrics],
            "invalid_cells": self.invalid(),
        }

    def repeats(self, load: float | None) -> dict[str, Any]:
        pools = [
            self.pools.pool(self.workload, arm.name, load or 0.0) for arm in (self.reference, self.layout)
        ]
        return {
            "runs": min(len(pool.cells) for pool in pools),
            "restarts": min(pool.restarts for pool in pools),
            "runs_needed": REPEATS,
            "restarts_needed": RESTARTS,
        }

    def invalid(self) -> list[str]:
        return sorted(
            cell
            for arm in (self.reference, self.layout)
            for load in self.pools.loads(self.workload, arm.name, valid=False)
            for cell in self.pools.pool(self.workload, arm.name, load).invalid
        )

    def judge(self, load: float | None) -> tuple[str, list[Fact]]:
        """The outcome, and why: the first reason is the one to print."""
        if load is None:
            return "undecided", [{"code": "no_shared_load", "tested": len(self.tested)}]
        found = self.differences[load]
        if not found:
            return "undecided", [{"code": "no_latencies", "load": load}]
        reasons: list[Fact] = []
        repeats = self.repeats(load)
        if repeats["runs"] < REPEATS or repeats["restarts"] < RESTARTS:
            reasons.append({"code": "few_repeats", **repeats})
        weak = [one for one in found if not one.supported]
        if weak:
            one = max(weak, key=lambda item: item.gate.needs - item.gate.n)
            fact = {
                "statistic": one.statistic,
                "metric": one.metric,
                "n": one.gate.n,
                "needs": one.gate.needs,
            }
            reasons.append({"code": "few_requests", **fact})
        outcome, why = self.by_differences(load, found)
        reasons.append(why)
        return ("undecided" if len(reasons) > 1 else outcome), reasons

    def by_differences(self, load: float, found: Sequence[Compared]) -> tuple[str, Fact]:
        by_finding: dict[str, list[Compared]] = {}
        for one in found:
            by_finding.setdefault(one.finding(self.margin), []).append(one)
        better, worse = by_finding.get("better", []), by_finding.get("worse", [])
        unclear = by_finding.get("unclear", [])
        if better and not worse and not unclear:
            return "wins", {"code": "better", **_facts(better[0])}
        if worse and not better and not unclear:
            return "loses", {"code": "worse", **_facts(worse[0])}
        _, ours, ours_not = self.keeps(self.layout, load)
        _, theirs, theirs_not = self.keeps(self.reference, load)
        if better and ours and theirs_not:
            return "wins", {"code": "keeps_slo", "keeper": self.layout.name, **_facts(better[0])}
        if worse and theirs and ours_not:
            return "loses", {"code": "keeps_slo", "keeper": self.reference.name, **_facts(worse[0])}
        if better and worse:
            return "undecided", {"code": "mixed", "worse": _facts(worse[0]), **_facts(better[0])}
        if unclear:
            code = "unclear" if unclear[0].supported else "reads"
            return "undecided", {"code": code, **_facts(unclear[0])}
        return "undecided", {"code": "no_difference", **_facts(found[0])}

    def next(self, load: float | None, outcome: str, reasons: Sequence[Fact]) -> Fact | None:
        """What to measure to decide; None where it is decided at the edge of nothing."""
        codes = {reason["code"]: reason for reason in reasons}
        if "no_shared_load" in codes or "no_latencies" in codes:
            return {"code": "measure_valid", "cells": len(self.invalid())}
        if "few_repeats" in codes:
            more = {"restarts": REPEATS}
            return {"code": "more_restarts", **more}
        if "few_requests" in codes:
            lack = codes["few_requests"]
            return {"code": "more_requests", "needs": lack["needs"], "n": lack["n"], "load": load}
        if "unclear" in codes:
            units = next(iter(self.differences[load or 0.0])).units
            return {"code": "more_units", "units": units, "level": codes["unclear"]["level"]}
        if "mixed" in codes:
            return {"code": "set_slo" if not self.limits.limits else "tighter_slo"}
        if "no_difference" in codes and load is not None:
            above = [other for other in self.shared if other > load]
            if above:
                return {"code": "between_loads", "load": load, "above": above[0]}
            return {"code": "higher_load", "load": load}
        if outcome != "undecided" and load == self.shared[-1] and self.limits.limits:
            both = all(self.keeps(arm, load)[0] for arm in (self.reference, self.layout))
            return {"code": "higher_load", "load": load} if both else None
        return None

    def break_even(self, metric: str) -> dict[str, Any]:
        line = [
            (load, one) for load, found in self.differences.items() for one in found if one.metric == metric
        ]
        return {"axis": "concurrency", "metric": metric} | break_even_of(line)


def _facts(one: Compared) -> Fact:
    return one.record()


def break_even_of(line: Sequence[tuple[float, Compared]]) -> dict[str, Any]:
    """Where the change passes zero along an axis, as JSON.

    Args:
        line: places of the axis, ascending, with the comparison at each.
    """
    known = [(at, one) for at, one in line if math.isfinite(one.change)]
    if not known:
        return {"at": None, "low": None, "high": None, "better_below": None, "places": 0, "supported": False}
    found: BreakEven = break_even(
        [at for at, _ in known],
        [one.change for _, one in known],
        [Interval(one.low, one.high) for _, one in known],
    )
    interval = found.interval
    return {
        "at": None if found.at is None else finite(found.at),
        "low": None if interval is None else finite(interval.low),
        "high": None if interval is None else finite(interval.high),
        "better_below": "reference" if found.better_below == "a" else "layout",
        "places": len(known),
        "supported": all(one.supported for _, one in known),
    }


def input_break_even(found: Sequence[Mapping[str, Any]], pools: Pools) -> list[dict[str, Any]]:
    """Break-even along the input length: per pair, metric and load, over workloads of equal output length.

    Args:
        found: the verdicts.
        pools: the cells that they were made from.
    """
    lines: dict[tuple[str, str, str, float, int], list[tuple[float, Mapping[str, Any]]]] = {}
    for verdict in found:
        workload = verdict["workload"]
        if workload not in pools.input_tokens or workload not in pools.output_tokens:
            continue
        for one in verdict["differences"]:
            key = (verdict["reference"], verdict["layout"], one["metric"], one["load"])
            place = (float(pools.input_tokens[workload]), one)
            lines.setdefault((*key, pools.output_tokens[workload]), []).append(place)
    result = []
    for (reference, layout, metric, load, output), line in lines.items():
        known = [(at, one) for at, one in sorted(line, key=lambda p: p[0]) if one["change"] is not None]
        if len({at for at, _ in known}) < 2:
            continue
        turn = break_even(
            [at for at, _ in known],
            [one["change"] for _, one in known],
            [Interval(_end(one["low"], -1), _end(one["high"], 1)) for _, one in known],
        )
        result.append(
            {
                "axis": "input_tokens",
                "reference": reference,
                "layout": layout,
                "metric": metric,
                "statistic": known[0][1]["statistic"],
                "load": load,
                "output_tokens": output,
                "at": None if turn.at is None else finite(turn.at),
                "low": None if turn.interval is None else finite(turn.interval.low),
                "high": None if turn.interval is None else finite(turn.interval.high),
                "better_below": "reference" if turn.better_below == "a" else "layout",
                "places": len(known),
                "supported": all(one["supported"] for _, one in known),
            }
        )
    return result


def _end(value: float | None, sign: int) -> float:
    return sign * math.inf if value is None else value
