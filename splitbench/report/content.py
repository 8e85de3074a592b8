# SPDX-License-Identifier: Apache-2.0
"""What a report says, computed from the tables: effects and the table of cells; no HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from splitbench.figures.measured import KIND_WORDS, Layout, Measured, Metric, Sample
from splitbench.serving.plan import Plan
from splitbench.statistics.quantiles import Interval, quantile_interval, quantiles, sample_gate

CELL_PERCENTILES = (50.0, 90.0, 99.0)
REPEATS_FOR_A_VERDICT = 3


@dataclass(frozen=True)
class Report:
    """All that a page is made from.

    Args:
        experiment: its name.
        question: one sentence that the experiment answers; empty: the general one.
        measured: the tables.
        figures: stems of written figures (`stem.json`, `.png`, `.svg`), in the order of the page.
        stack: facts about the pinned software, as label and value.
        machine: facts about the machine, as label and value.
        plans: the layouts' launch plans.
        rerun: what to run for what, as purpose and command.
        code_version: of the workflow that wrote the report.
        digests: further lineage (config, stack lock, environment), as label and digest.
    """

    experiment: str
    measured: Measured
    figures: Sequence[Path] = ()
    question: str = ""
    stack: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    plans: Sequence[Plan] = ()
    rerun: Sequence[tuple[str, str]] = ()
    code_version: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)


def ms(value: float) -> str:
    """Milliseconds with three digits that count: 4.91, 25.3, 412, 1,204."""
    if not math.isfinite(value):
        return "none"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}"


@dataclass(frozen=True)
class Number:
    """A percentile as it may be printed.

    Attributes:
        text: the value in ms, with `≥` before it where the sample is too small; `none` without any value.
        note: why, as in `n=64, needs 368`; empty where the value stands.
        value_ms: the sample's percentile; NaN if there is none.
        interval: its confidence interval, where one can be given.
    """

    text: str
    note: str
    value_ms: float
    supported: bool
    interval: Interval | None = None


def number(values: np.ndarray, requests: int, percentile: float, metric: Metric) -> Number:
    """A percentile of a latency; `requests` is the number of independent units behind it.

    Request-level latencies get a distribution-free interval. ITLs get none here: they are clustered within
    requests, so their interval needs the bootstrap over restarts, runs and requests.
    """
    if not values.size:
        return Number("none", f"n={requests}", math.nan, False)
    level = percentile / 100
    value = float(quantiles(values, [level])[0])
    gate = sample_gate(level, requests)
    interval = None if metric == "itl_ms" else quantile_interval(values, level)
    if gate.supported:
        return Number(ms(value), "", value, True, interval)
    # Below what is needed only the interval's lower end exists; without an interval the sample's own value.
    bound = interval.low if interval and math.isfinite(interval.low) else value
    return Number(f"≥ {ms(bound)}", f"n={requests:,}, needs {gate.needs:,}", value, False, interval)


@dataclass(frozen=True)
class Growth:
    """How a percentile of one layout grew from the lowest to the highest concurrency."""

    layout: Layout
    low: Number | None
    high: Number | None
    low_spread: tuple[float, float] | None
    high_spread: tuple[float, float] | None
    why_not: str = ""

    @property
    def factor(self) -> float | None:
        """High over low; None where either is missing."""
        if self.low is None or self.high is None or not self.low.value_ms:
            return None
        return self.high.value_ms / self.low.value_ms


@dataclass(frozen=True)
class Effect:
    """One workload and budget: each layout's growth, and how well it is supported."""

    workload: str
    budget: str
    metric: Metric
    percentile: float
    low: int
    high: int
    growths: tuple[Growth, ...]
    support: str


def effects(measured: Measured, *, metric: Metric = "itl_ms", percentile: float = 99.0) -> list[Effect]:
    """Per workload and budget with at least two layouts, how the percentile grows with concurrency.

    Invalid cells are left out: a layout without a valid cell at an end says so instead of a number.
    """
    found: list[Effect] = []
    for workload in measured.workloads:
        layouts = measured.layouts(workload)
        for budget in dict.fromkeys(layout.budget for layout in layouts):
            arms = [layout for layout in layouts if layout.budget == budget]
            found.extend(_effect(measured, workload, budget, arms, metric, percentile))
    return found


def _effect(
    measured: Measured, workload: str, budget: str, arms: list[Layout], metric: Metric, percentile: float
) -> list[Effect]:
    """The effect between the lowest and the highest concurrency where every arm has a valid cell.

    If the arms share fewer than two, the ends of all loads, so that the page says which arm lacks them.
    """
    loads = sorted(set().union(*map(set, measured.concurrencies(workload, arms).values())))
    if len(loads) < 2:
        return []
    samples = {
        (layout.name, load): _valid(measured, workload, layout, load, metric)
        for layout in arms
        for load in loads
    }
    shared = [load for load in loads if all(samples[layout.name, load][0] for layout in arms)]
    ends = (shared[0], shared[-1]) if len(shared) > 1 else (loads[0], loads[-1])
    growths: list[Growth] = []
    used: list[Sample] = []
    for layout in arms:
        pair = [samples[layout.name, load] for load in ends]
        used.extend(sample for sample, _ in pair if sample)
        low, high = (
            number(sample.values, sample.requests, percentile, metric) if sample else None
            for sample, _ in pair
        )
        low_spread, high_spread = (_spread(sample, percentile) if sample else None for sample, _ in pair)
        growths.append(
            Growth(layout, low, high, low_spread, high_spread, "; ".join(why for _, why in pair if why))
        )
    support = _support(used, percentile, metric)
    if ends[1] < loads[-1] or ends[0] > loads[0]:
        beyond = [load for load in loads if not ends[0] <= load <= ends[1]]
        lacking = [
            f"{layout.name}: {samples[layout.name, load][1]}"
            for load in beyond
            for layout in arms
            if samples[layout.name, load][1]
        ]
        support = f"Left out: {'; '.join(lacking)}. {support}".strip()
    return [Effect(workload, budget, metric, percentile, *ends, tuple(growths), support)]


def _valid(
    measured: Measured, workload: str, layout: Layout, load: int, metric: Metric
) -> tuple[Sample | None, str]:
    samples = measured.samples(workload, layout, load, metric)
    for sample in samples:
        if sample.valid and sample.values.size:
            return sample, ""
    if samples:
        return None, f"no valid cell at c={load} ({', '.join(samples[0].reasons)})"
    return None, f"not measured at c={load}"


def _spread(sample: Sample, percentile: float) -> tuple[float, float] | None:
    """Smallest and largest of the repeats' own percentiles; None for a single repeat."""
    if len(sample.parts) < 2:
        return None
    each = [float(quantiles(part, [percentile / 100])[0]) for part in sample.parts if part.size]
    return min(each), max(each)


def _support(ends: Sequence[Sample], percentile: float, metric: Metric) -> str:
    """What holds the numbers up, or does not."""
    if not ends:
        return ""
    sentences = []
    least = min(sample.requests for sample in ends)
    gate = sample_gate(percentile / 100, least)
    if not gate.supported:
        sentences.append(
            f"P{percentile:g} needs {gate.needs:,} requests; the smallest sample here has {least:,}, "
            "so these are readings of small samples, not supported estimates"
        )
    repeats = min(len(sample.parts) for sample in ends)
    if repeats == 1:
        sentences.append("one repeat only, so no interval can be given")
    elif metric == "itl_ms":
        sentences.append(f"brackets are the range of {repeats} repeats, not a confidence interval")
    if repeats < REPEATS_FOR_A_VERDICT:
        sentences.append(f"a verdict asks for at least {REPEATS_FOR_A_VERDICT} repeats")
    text = "; ".join(sentences)
    return text[:1].upper() + text[1:] + "." if text else ""


@dataclass(frozen=True)
class CellRow:
    """One line of the table of cells."""

    cell_id: str
    layout: str
    kind: str
    budget: str
    load: str
    run: str
    completed: str
    verdict: str
    numbers: Mapping[str, tuple[Number, ...]]
    reasons: tuple[tuple[str, str, str], ...]


def cell_rows(measured: Measured, workload: str, metrics: Sequence[Metric]) -> list[CellRow]:
    """The cells of a workload, aggregated before PD, by concurrency, restart and repeat."""
    layouts = {layout.name: layout for layout in measured.layouts(workload)}
    ranks = {name: rank for rank, name in enumerate(layouts)}
    rows = measured.cells[measured.cells["workload"] == workload].to_dict("records")
    rows.sort(key=lambda row: ranks[str(row["layout"])])
    return [_cell_row(measured, row, layouts[str(row["layout"])], metrics) for row in rows]


def _cell_row(
    measured: Measured, row: Mapping[Any, Any], layout: Layout, metrics: Sequence[Metric]
) -> CellRow:
    cell_id = str(row["cell_id"])
    numbers: dict[str, tuple[Number, ...]] = {}
    count = 0
    for metric in metrics:
        values, count = measured.values(cell_id, metric)
        numbers[metric] = tuple(number(values, count, p, metric) for p in CELL_PERCENTILES)
    asked = row.get("requests_asked")
    total = len(measured.requests(cell_id)) if asked is None or asked != asked else int(asked)
    concurrency, rate = row["concurrency"], row.get("request_rate")
    load = f"c={int(concurrency)}" if concurrency == concurrency and concurrency is not None else "open loop"
    if load == "open loop" and isinstance(rate, float) and math.isfinite(rate):
        load = f"{rate:g} req/s"
    return CellRow(
        cell_id=cell_id,
        layout=layout.name,
        kind=KIND_WORDS[layout.kind],
        budget=layout.budget,
        load=load,
        run=f"{row['restart']}-{row['repeat']}",
        completed=f"{count:,} of {total:,}",
        verdict=row["verdict"] if isinstance(row["verdict"], str) else "unchecked",
        numbers=numbers,
        reasons=tuple(measured.reasons(cell_id)),
    )
