# SPDX-License-Identifier: Apache-2.0
"""Claims judged: reproduced, contradicted, or not decidable, with the figures behind each (see `relations`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitbench.experiment.claims import Claim, ClaimTest
from splitbench.statistics.pools import Arm, Pools
from splitbench.statistics.relations import JUDGES, NO, UNKNOWN, YES, Found, figure
from splitbench.statistics.verdict import same_content


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
    figures = JUDGES[test.relation](test, pools, loads, metric, margin) if loads else []
    if not figures:
        figures = [figure(test, metric, UNKNOWN, UNKNOWN, reason={"code": "not_measured"})]
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
