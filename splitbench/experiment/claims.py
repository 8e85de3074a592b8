# SPDX-License-Identifier: Apache-2.0
"""Expectations as data: what somebody claims about the layouts, so that the statistics can judge it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from splitbench.experiment.fields import Percentile, PositiveInt, Section, one_or_many

ClaimMetric = Literal["itl_ms", "ttft_ms", "second_token_ms", "e2e_ms"]
Relation = Literal[
    "at_most",
    "above",
    "grows",
    "lower",
    "higher",
    "not_lower",
    "not_higher",
    "serves_no_more",
    "crosses",
    "stairs",
    "smaller_gain",
]
# Relations that compare `layout` with `reference`; the others look at one layout.
BETWEEN_LAYOUTS = frozenset(
    {"lower", "higher", "not_lower", "not_higher", "serves_no_more", "crosses", "smaller_gain"}
)
# Relations that need a number to hold against.
WITH_THRESHOLD = frozenset({"at_most", "above", "serves_no_more", "stairs"})


def _statistic(value: Any) -> Any:
    known = isinstance(value, str) and re.fullmatch(r"mean|p[0-9]{1,2}(\.[0-9]{1,3})?", value)
    if not known or (value != "mean" and not float(value[1:])):
        raise ValueError(f"'{value}' is no statistic; use 'mean' or a percentile such as 'p50' or 'p99.5'")
    return value


Statistic = Annotated[str, BeforeValidator(_statistic)]


class ClaimTest(Section):
    """One comparison; it is made for every load and every statistic that it names."""

    metric: ClaimMetric = Field(description="which latency")
    statistic: Annotated[list[Statistic], BeforeValidator(one_or_many), Field(min_length=1)] = Field(
        ["p99"], description="'mean' or percentiles, as in p50 or [p50, p99]"
    )
    relation: Relation = Field(description="what is claimed; config/README.md says what each takes")
    workload: str = Field(description="whose cells")
    layout: str = Field(description="of which layout it is claimed")
    reference: str | None = Field(None, description="the layout that `layout` is compared with")
    other_workload: str | None = Field(None, description="smaller_gain: where the gain is larger")
    concurrency: Annotated[list[PositiveInt], BeforeValidator(one_or_many)] = Field(
        default_factory=list, description="loads; default: all that are measured"
    )
    threshold: PositiveFloat | None = Field(
        None, description="ms for at_most, above, serves_no_more; steps for stairs"
    )
    between: tuple[Percentile, Percentile] | None = Field(
        None, description="crosses: percentiles, from and to"
    )
    by_percent: NonNegativeFloat = Field(0.0, description="lower, higher: by at least this much")
    agree: Literal["all", "most"] = Field(
        "all", description="whether every comparison has to hold, or more than half of them"
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.reference is not None) != (self.relation in BETWEEN_LAYOUTS):
            verb = "needs" if self.relation in BETWEEN_LAYOUTS else "takes no"
            raise ValueError(f"relation '{self.relation}' {verb} 'reference'; mend that")
        if (self.threshold is not None) != (self.relation in WITH_THRESHOLD):
            verb = "needs" if self.relation in WITH_THRESHOLD else "takes no"
            raise ValueError(f"relation '{self.relation}' {verb} 'threshold'; mend that")
        if (self.between is not None) != (self.relation == "crosses"):
            raise ValueError("'between' belongs to relation 'crosses', and only there; mend that")
        if self.between is not None and not 50 <= self.between[0] < self.between[1] < 100:
            raise ValueError("'between' must ascend from 50 to below 100; give two percentiles")
        if (self.other_workload is not None) != (self.relation == "smaller_gain"):
            raise ValueError("'other_workload' belongs to relation 'smaller_gain', and only there; mend that")
        return self


class Claim(Section):
    """What somebody says, and the comparisons that it stands or falls with: all of them must hold."""

    says: str = Field(description="the claim in one sentence")
    says_ja: str = Field("", description="the same in Japanese, for reports in that language")
    tests: Annotated[list[ClaimTest], Field(min_length=1)] = Field(
        description="the comparisons that it stands or falls with"
    )
