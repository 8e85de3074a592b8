# SPDX-License-Identifier: Apache-2.0
"""Claims judged: reproduced, contradicted, or not decidable, with the figures behind each.

Every comparison is judged by its 95 % interval, never by the value alone. `reads` says beside it what the values
alone would say, so that a sample too small to decide still shows which way it points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from splitbench.experiment.claims import Claim, ClaimTest
from splitbench.statistics.bootstrap import crossing_quantile, paired_differences, paired_mean_difference
from splitbench.statistics.compare import Compared, compared, finite, from_difference, level_of
from splitbench.statistics.pools import Arm, Pools, values_of
from splitbench.statistics.quantiles import Gate, Interval, sample_gate
from splitbench.statistics.slo import mean_with_interval
from splitbench.statistics.steps import count_steps
from splitbench.statistics.verdict import same_content

YES, NO, UNKNOWN = "reproduced", "contradicted", "not decidable"
STEPS_NEED = 100
Found = dict[str, Any]


def judge_claims(claims: Mapping[str, Claim], pools: Pools, margin_percent: float) -> list[Found]:
    """Judge every claim.

    Args:
        claims: by name.
        pools: the cells.
        margin_percent: what `not_lower`, `not_higher` and `grows` let pass as no difference.
    """
    judged = []
    for name, claim in claims.items():
        tests = [_judged(test, pools, margin_percent / 100) for test in claim.tests]
        outcomes = [test["outcome"] for test in tests]
        judged.append(
            {
                "claim": name,
                "says": claim.says,
                "says_ja": claim.says_ja,
                "outcome": all_of(outcomes),
                "reads": all_of([test["reads"] for test in tests]),
                "tests": tests,
            }
        )
    return judged


def all_of(outcomes: Sequence[str]) -> str:
    """One contradiction contradicts all; what is left undecided decides nothing."""
    if NO in outcomes:
        return NO
    return YES if outcomes and all(outcome == YES for outcome in outcomes) else UNKNOWN


def most_of(outcomes: Sequence[str]) -> str:
    """What more than half of the comparisons say."""
    for outcome in (YES, NO):
        if 2 * outcomes.count(outcome) > len(outcomes):
            return outcome
    return UNKNOWN


def _judged(test: ClaimTest, pools: Pools, margin: float) -> Found:
    # What is left to the default is every load that the layouts involved were asked to be measured at.
    names = [test.layout, *([test.reference] if test.reference else [])]
    loads: Sequence[float] = [float(load) for load in test.concurrency] or sorted(
        set().union(*(pools.loads(test.workload, name, valid=False) for name in names))
    )
    metric = test.metric
    # A claim is judged as it was made; that its TTFTs differ in content is said beside it.
    arms = [pools.arms[name] for name in names if name in pools.arms]
    mixed = same_content(metric, *arms) != metric
    figures = _JUDGES[test.relation](test, pools, loads, metric, margin) if loads else []
    if not figures:
        figures = [_figure(test, metric, UNKNOWN, UNKNOWN, reason={"code": "not_measured"})]
    join = all_of if test.agree == "all" else most_of
    return {
        **test.model_dump(mode="json", exclude_none=True),
        "mixed_content": mixed,
        "budgets": {arm.name: arm.occupies for arm in arms} if _apart(arms) else {},
        "outcome": join([figure["outcome"] for figure in figures]),
        "reads": join([figure["reads"] for figure in figures]),
        "figures": figures,
    }


def _apart(arms: Sequence[Arm]) -> bool:
    """Whether layouts occupy different budgets: one would win by having more."""
    return len({(arm.budget_kind, arm.budget) for arm in arms}) > 1


def _figure(test: ClaimTest, metric: str, outcome: str, reads: str, **facts: Any) -> Found:
    return {"metric": metric, "layout": test.layout, "outcome": outcome, "reads": reads, **facts}


def decided(value: float, low: float, high: float, yes: Callable[[float], bool], sure: bool) -> str:
    """Judge an interval by a condition that holds from some point on in one direction.

    Args:
        value: the estimate.
        low: lower end of its interval.
        high: upper end.
        yes: the condition, monotone.
        sure: whether the interval may be trusted; if not, only unknown comes out.
    """
    if not sure or math.isnan(value):
        return UNKNOWN
    ends = [yes(low), yes(high)]
    return YES if all(ends) else NO if not any(ends) else UNKNOWN


def _reads(holds: bool, value: float) -> str:
    return UNKNOWN if math.isnan(value) else YES if holds else NO


def _why(outcome: str, gate: Gate, statistic: str, low: float, high: float) -> Found | None:
    """Why something stays undecided."""
    if outcome != UNKNOWN:
        return None
    if not gate.supported:
        return {"code": "few_requests", "statistic": statistic, "n": gate.n, "needs": gate.needs}
    if not (math.isfinite(low) and math.isfinite(high)):
        return {"code": "one_unit", "n": gate.n}
    return {"code": "interval"}


def _each(test: ClaimTest, loads: Iterable[float]) -> Iterable[tuple[float, str]]:
    return [(load, statistic) for load in loads for statistic in test.statistic]


def _against_threshold(
    test: ClaimTest, pools: Pools, loads: Sequence[float], metric: str, margin: float
) -> list[Found]:
    del margin
    limit = float(test.threshold or 0.0)

    def yes(value: float) -> bool:
        return value <= limit if test.relation == "at_most" else value > limit

    found = []
    for load, statistic in _each(test, loads):
        read = _value(pools, test.workload, test.layout, load, metric, statistic)
        if read is None:
            found.append(
                _figure(
                    test,
                    metric,
                    UNKNOWN,
                    UNKNOWN,
                    load=load,
                    statistic=statistic,
                    reason={"code": "no_valid_cell"},
                )
            )
            continue
        value, interval, gate = read
        # A sample too small for the percentile still bounds it from one side.
        outcome = decided(value, interval.low, interval.high, yes, True)
        found.append(
            _figure(
                test,
                metric,
                outcome,
                _reads(yes(value), value),
                load=load,
                statistic=statistic,
                value_ms=finite(value),
                low_ms=finite(interval.low),
                high_ms=finite(interval.high),
                n=gate.n,
                needs=gate.needs,
                reason=_why(outcome, gate, statistic, interval.low, interval.high),
            )
        )
    return found


def _value(
    pools: Pools, workload: str, layout: str, load: float, metric: str, statistic: str
) -> tuple[float, Interval, Gate] | None:
    level = level_of(statistic)
    if level is not None:
        reading = pools.reading(workload, layout, load, metric, level)
        return None if reading is None else (reading.value, reading.interval, reading.gate)
    sample = pools.sample(workload, layout, load, metric)
    if sample is None:
        return None
    sums, totals = np.zeros(sample.units), np.zeros(sample.units)
    for values, label in sample.values():
        labels = np.broadcast_to(np.asarray(label), len(values))
        sums += np.bincount(labels, weights=values, minlength=sample.units)
        totals += np.bincount(labels, minlength=sample.units)
    filled = totals > 0
    _, interval = mean_with_interval((sums[filled] / totals[filled]).tolist())
    return float(sums.sum() / totals.sum()), interval, sample_gate(0.5, sample.requests)


def _between_layouts(
    test: ClaimTest, pools: Pools, loads: Sequence[float], metric: str, margin: float
) -> list[Found]:
    by = test.by_percent / 100
    conditions: dict[str, Callable[[float], bool]] = {
        "lower": lambda change: change < -by,
        "higher": lambda change: change > by,
        "not_lower": lambda change: change >= -margin,
        "not_higher": lambda change: change <= margin,
    }
    yes = conditions[test.relation]
    found = []
    for load, statistic in _each(test, loads):
        one = compared(pools, test.workload, str(test.reference), test.layout, load, metric, statistic)
        if one is None:
            reason = {"code": "no_valid_cell"}
            found.append(
                _figure(test, metric, UNKNOWN, UNKNOWN, load=load, statistic=statistic, reason=reason)
            )
            continue
        outcome = decided(one.change, one.low, one.high, yes, one.supported)
        found.append(_of(test, one, outcome, _reads(yes(one.change), one.change)))
    return found


def _of(test: ClaimTest, one: Compared, outcome: str, reads: str) -> Found:
    reason = _why(outcome, one.gate, one.statistic, one.low, one.high)
    return one.record() | {
        "layout": test.layout,
        "reference": test.reference,
        "outcome": outcome,
        "reads": reads,
        "reason": reason,
    }


def _grows(test: ClaimTest, pools: Pools, loads: Sequence[float], metric: str, margin: float) -> list[Found]:
    """From the lowest to the highest load it is surely higher, and no step between surely falls."""
    found = []
    for statistic in test.statistic:
        ladder = [
            load
            for load in sorted(loads)
            if pools.sample(test.workload, test.layout, load, metric) is not None
        ]
        if len(ladder) < 2:
            reason = {"code": "no_valid_cell"}
            found.append(_figure(test, metric, UNKNOWN, UNKNOWN, statistic=statistic, reason=reason))
            continue
        whole = _step(pools, test, metric, statistic, ladder[0], ladder[-1])
        steps = [_step(pools, test, metric, statistic, a, b) for a, b in pairwise(ladder)]
        outcome = decided(whole.change, whole.low, whole.high, lambda change: change > 0, whole.supported)
        falls = [step for step in steps if step.supported and step.high < -margin]
        if falls:
            outcome = NO
        reads = _reads(whole.change > 0 and all(s.change >= -margin for s in steps), whole.change)
        found.append(
            _of(test, whole, outcome, reads)
            | {
                "from_load": ladder[0],
                "loads": ladder,
                "values_ms": [finite(steps[0].reference_ms), *(finite(step.layout_ms) for step in steps)],
            }
        )
    return found


def _step(pools: Pools, test: ClaimTest, metric: str, statistic: str, low: float, high: float) -> Compared:
    a = pools.sample(test.workload, test.layout, low, metric)
    b = pools.sample(test.workload, test.layout, high, metric)
    assert a is not None and b is not None  # the ladder holds only loads with a sample
    level = level_of(statistic)
    found = paired_mean_difference(a, b) if level is None else paired_differences(a, b, [level])[0]
    return from_difference(found, metric, statistic, high)


def _serves_no_more(
    test: ClaimTest, pools: Pools, loads: Sequence[float], metric: str, margin: float
) -> list[Found]:
    """The largest load within the threshold is no larger than that of the reference."""
    del margin
    found = []
    for statistic in test.statistic:
        mine = _served(test, pools, test.layout, loads, metric, statistic)
        theirs = _served(test, pools, str(test.reference), loads, metric, statistic)
        if mine is None or theirs is None:
            reason = {"code": "no_valid_cell"}
            found.append(_figure(test, metric, UNKNOWN, UNKNOWN, statistic=statistic, reason=reason))
            continue
        outcome = YES if mine[2] <= theirs[1] else NO if mine[1] > theirs[2] else UNKNOWN
        found.append(
            _figure(
                test,
                metric,
                outcome,
                YES if mine[0] <= theirs[0] else NO,
                reference=test.reference,
                statistic=statistic,
                load=mine[0],
                reference_load=theirs[0],
                loads=[mine[1], mine[2]],
                reference_loads=[theirs[1], theirs[2]],
                reason={"code": "interval"} if outcome == UNKNOWN else None,
            )
        )
    return found


def _served(
    test: ClaimTest, pools: Pools, layout: str, loads: Sequence[float], metric: str, statistic: str
) -> tuple[float, float, float] | None:
    """Largest load within the threshold by value, surely, and possibly; 0 where the lowest misses it."""
    best = [0.0, 0.0, 0.0]
    going = [True, True, True]
    for load in sorted(loads):
        read = _value(pools, test.workload, layout, load, metric, statistic)
        if read is None:
            return None
        for k, end in enumerate((read[0], read[1].high, read[1].low)):
            going[k] = going[k] and end <= float(test.threshold or 0.0)
            best[k] = load if going[k] else best[k]
    return best[0], best[1], best[2]


def _crosses(
    test: ClaimTest, pools: Pools, loads: Sequence[float], metric: str, margin: float
) -> list[Found]:
    """The two distributions cross, the layout being better above the crossing, at a level between two."""
    del margin
    low, high = test.between or (50.0, 100.0)
    found = []
    for load in loads:
        a = pools.sample(test.workload, str(test.reference), load, metric)
        b = pools.sample(test.workload, test.layout, load, metric)
        if a is None or b is None:
            reason = {"code": "no_valid_cell"}
            found.append(_figure(test, metric, UNKNOWN, UNKNOWN, load=load, reason=reason))
            continue
        crossing = crossing_quantile(a, b)
        at = math.nan if crossing.p is None else 100 * crossing.p
        ends = crossing.interval
        ends_percent = (-math.inf, math.inf) if ends is None else (100 * ends.low, 100 * ends.high)
        right_way = crossing.lower_below == "a"
        # The level itself has to be one that the number of requests supports.
        gate = sample_gate(low / 100, min(a.requests, b.requests))
        if not gate.supported:
            outcome = UNKNOWN
        elif crossing.p is None:
            # No crossing as far as the sample reaches contradicts one in a range that it covers.
            covered = sample_gate(high / 100, gate.n).supported and crossing.share < 0.025
            outcome = NO if covered else UNKNOWN
        elif low <= ends_percent[0] and ends_percent[1] <= high and crossing.share > 0.975:
            outcome = YES if right_way else NO
        else:
            apart = ends_percent[1] < low or ends_percent[0] > high
            outcome = NO if apart and crossing.share > 0.975 else UNKNOWN
        reads = YES if crossing.p is not None and right_way and low <= at <= high else NO
        found.append(
            _figure(
                test,
                metric,
                outcome,
                reads,
                reference=test.reference,
                load=load,
                percentile=finite(at),
                low_percentile=finite(ends_percent[0]),
                high_percentile=finite(ends_percent[1]),
                lower_below=test.reference if right_way else test.layout,
                share_of_draws=crossing.share,
                n=gate.n,
                needs=gate.needs,
                reason=_why(outcome, gate, f"p{low:g}", 0.0, 0.0),
            )
        )
    return found


def _stairs(test: ClaimTest, pools: Pools, loads: Sequence[float], metric: str, margin: float) -> list[Found]:
    """The distribution function has at least so many steps."""
    del margin
    wanted = float(test.threshold or 0.0)
    found = []
    for load in loads:
        sample = pools.sample(test.workload, test.layout, load, metric)
        if sample is None:
            reason = {"code": "no_valid_cell"}
            found.append(_figure(test, metric, UNKNOWN, UNKNOWN, load=load, reason=reason))
            continue
        steps = count_steps(values_of(sample))
        gate = Gate(0.5, sample.requests, STEPS_NEED)
        outcome = decided(steps.count, steps.low, steps.high, lambda n: n >= wanted, gate.supported)
        facts = {"steps": steps.count, "low_steps": steps.low, "high_steps": steps.high}
        why = _why(outcome, gate, "steps", steps.low, steps.high)
        reads = YES if steps.count >= wanted else NO
        found.append(
            _figure(test, metric, outcome, reads, load=load, n=gate.n, needs=gate.needs, reason=why, **facts)
        )
    return found


def _smaller_gain(
    test: ClaimTest, pools: Pools, loads: Sequence[float], metric: str, margin: float
) -> list[Found]:
    """The layout lowers the latency by a smaller share here than on the other workload."""
    del margin
    found = []
    for load, statistic in _each(test, loads):
        here, there = (
            compared(pools, workload, str(test.reference), test.layout, load, metric, statistic)
            for workload in (test.workload, str(test.other_workload))
        )
        if here is None or there is None:
            reason = {"code": "no_valid_cell"}
            found.append(
                _figure(test, metric, UNKNOWN, UNKNOWN, load=load, statistic=statistic, reason=reason)
            )
            continue
        # Two independent ratios: their reaches on the logarithmic scale add up by squares.
        gap = math.log1p(here.change) - math.log1p(there.change)
        reach = math.hypot(_reach(here), _reach(there))
        sure = here.supported and there.supported
        outcome = decided(gap, gap - reach, gap + reach, lambda value: value > 0, sure)
        found.append(
            _of(test, here, outcome, _reads(gap > 0, gap))
            | {"other_workload": test.other_workload, "other_change": finite(there.change)}
            | {"other_low": finite(there.low), "other_high": finite(there.high)}
        )
    return found


def _reach(one: Compared) -> float:
    if not (math.isfinite(one.low) and math.isfinite(one.high)):
        return math.inf
    return (math.log1p(one.high) - math.log1p(one.low)) / 2


_Judge = Callable[[ClaimTest, Pools, Sequence[float], str, float], list[Found]]
_JUDGES: dict[str, _Judge] = {
    "at_most": _against_threshold,
    "above": _against_threshold,
    "lower": _between_layouts,
    "higher": _between_layouts,
    "not_lower": _between_layouts,
    "not_higher": _between_layouts,
    "grows": _grows,
    "serves_no_more": _serves_no_more,
    "crosses": _crosses,
    "stairs": _stairs,
    "smaller_gain": _smaller_gain,
}
