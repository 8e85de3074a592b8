# SPDX-License-Identifier: Apache-2.0
"""What a report says, computed from the tables: effects and the table of cells; no HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from splitbench.environment.neighbours import strangers
from splitbench.figures.measured import Layout, Measured, Metric, Sample
from splitbench.report.words import Words
from splitbench.serving.plan import Plan
from splitbench.statistics.clusters import Clustered, clustered_quantile
from splitbench.statistics.quantiles import Interval, sample_gate
from splitbench.wording import Language

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
        facts: per layout, what its engines said of themselves: text by fact and engine.
        rerun: what to run for what, as purpose and command.
        code_version: of the workflow that wrote the report.
        slo: what was asked of latencies; empty where nothing was.
        margin_percent: differences below it do not count.
        verdicts, break_even_input, claims: as the statistics stage wrote them.
        rerun_figure: command that draws one figure again, with `{figure}` for its name.
        language: of the page.
        highest_loads: per layout and workload the highest load that kept the SLO, as name and words.
        digests: further lineage (config, stack lock, environment), as label and digest.
    """

    experiment: str
    measured: Measured
    figures: Sequence[Path] = ()
    question: str = ""
    stack: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    plans: Sequence[Plan] = ()
    facts: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    rerun: Sequence[tuple[str, str]] = ()
    code_version: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    slo: str = ""
    highest_loads: Sequence[tuple[str, str]] = ()
    margin_percent: float = 5.0
    verdicts: Sequence[Mapping[str, Any]] = ()
    break_even_input: Sequence[Mapping[str, Any]] = ()
    claims: Sequence[Mapping[str, Any]] = ()
    rerun_figure: str = ""
    language: Language = "en"


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
        note: its interval, or why it is no estimate, as in `n=64, needs 368`; empty where neither exists.
        value_ms: the sample's percentile; NaN if there is none.
        supported: whether the number of requests supports it.
        interval: its 95 % interval; an end that the sample cannot give is infinite.
    """

    text: str
    note: str
    value_ms: float
    supported: bool
    interval: Interval

    @property
    def brackets(self) -> str:
        """` [low–high]`, or nothing where an end is missing or the percentile is not supported.

        Spread between a few requests can look small by luck; the gate on their number comes first.
        """
        low, high = self.interval.low, self.interval.high
        shown = self.supported and math.isfinite(low) and math.isfinite(high)
        return f" [{ms(low)}–{ms(high)}]" if shown else ""


def number(sample: Clustered, percentile: float) -> Number:
    """A percentile with its interval and gate; what supports it are requests, never tokens."""
    reading = clustered_quantile(sample, percentile / 100)
    if math.isnan(reading.value):
        return Number("none", f"n={sample.requests:,}", math.nan, False, reading.interval)
    if reading.gate.supported:
        found = Number(ms(reading.value), "", reading.value, True, reading.interval)
        return replace(found, note=found.brackets.strip())
    bound = reading.interval.low if math.isfinite(reading.interval.low) else reading.value
    note = f"n={reading.gate.n:,}, needs {reading.gate.needs:,}"
    return Number(f"≥ {ms(bound)}", note, reading.value, False, reading.interval)


@dataclass(frozen=True)
class Growth:
    """How a percentile of one layout grew from the lowest to the highest concurrency."""

    layout: Layout
    low: Number | None
    high: Number | None
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


def effects(
    measured: Measured,
    *,
    metric: Metric = "itl_ms",
    percentile: float = 99.0,
    words: Words | None = None,
) -> list[Effect]:
    """Per workload and budget with at least two layouts, how the percentile grows with concurrency.

    Invalid cells are left out: a layout without a valid cell at an end says so instead of a number.
    """
    found: list[Effect] = []
    for workload in measured.workloads:
        layouts = measured.layouts(workload)
        for budget in dict.fromkeys(layout.budget for layout in layouts):
            arms = [layout for layout in layouts if layout.budget == budget]
            found.extend(_effect(measured, workload, budget, arms, metric, percentile, words or Words("en")))
    return found


def _effect(
    measured: Measured,
    workload: str,
    budget: str,
    arms: list[Layout],
    metric: Metric,
    percentile: float,
    words: Words,
) -> list[Effect]:
    """The effect between the lowest and the highest concurrency where every arm has a valid cell.

    If the arms share fewer than two, the ends of all loads, so that the page says which arm lacks them.
    """
    loads = sorted(set().union(*map(set, measured.concurrencies(workload, arms).values())))
    if len(loads) < 2:
        return []
    samples = {
        (layout.name, load): _valid(measured, workload, layout, load, metric, words)
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
            number(measured.units(sample.cells, metric), percentile) if sample else None for sample, _ in pair
        )
        growths.append(Growth(layout, low, high, "; ".join(why for _, why in pair if why)))
    support = _support(measured, used, percentile, words)
    if ends[1] < loads[-1] or ends[0] > loads[0]:
        beyond = [load for load in loads if not ends[0] <= load <= ends[1]]
        lacking = [
            f"{layout.name}: {samples[layout.name, load][1]}"
            for load in beyond
            for layout in arms
            if samples[layout.name, load][1]
        ]
        support = f"{words('support_left_out', lacking='; '.join(lacking))} {support}".strip()
    return [Effect(workload, budget, metric, percentile, *ends, tuple(growths), support)]


def _valid(
    measured: Measured, workload: str, layout: Layout, load: int, metric: Metric, words: Words
) -> tuple[Sample | None, str]:
    samples = measured.samples(workload, layout, load, metric)
    for sample in samples:
        if sample.valid and sample.values.size:
            return sample, ""
    if samples:
        return None, words("no_valid_at", load=load, reasons=", ".join(samples[0].reasons))
    return None, words("not_at", load=load)


def _support(measured: Measured, ends: Sequence[Sample], percentile: float, words: Words) -> str:
    """What holds the numbers up, or does not."""
    if not ends:
        return ""
    sentences = []
    least = min(sample.requests for sample in ends)
    gate = sample_gate(percentile / 100, least)
    if not gate.supported:
        numbers = {"percentile": f"{percentile:g}", "needs": f"{gate.needs:,}", "least": f"{least:,}"}
        sentences.append(words("support_few", **numbers))
    cells = measured.cells.set_index("cell_id")
    starts = min(cells.loc[list(sample.cells), "restart"].nunique() for sample in ends)
    repeats = min(len(sample.parts) for sample in ends)
    if starts > 1:
        sentences.append(words("support_starts", starts=starts))
    else:
        unit = words("unit_runs" if repeats > 1 else "unit_requests")
        sentences.append(words("support_one_start", unit=unit))
    if repeats < REPEATS_FOR_A_VERDICT:
        are = words("is" if repeats == 1 else "are")
        sentences.append(words("support_repeats", needed=REPEATS_FOR_A_VERDICT, repeats=repeats, are=are))
    if words.language == "ja":
        return "。".join(sentences) + "。"
    text = "; ".join(sentences)
    return text[:1].upper() + text[1:] + "."


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
    others = strangers(measured.cells)
    rows.sort(key=lambda row: ranks[str(row["layout"])])
    found = [_cell_row(measured, row, layouts[str(row["layout"])], metrics) for row in rows]
    return [
        replace(row, reasons=(*row.reasons, ("environment", "warn", others[row.cell_id])))
        if row.cell_id in others
        else row
        for row in found
    ]


def _cell_row(
    measured: Measured, row: Mapping[Any, Any], layout: Layout, metrics: Sequence[Metric]
) -> CellRow:
    cell_id = str(row["cell_id"])
    numbers: dict[str, tuple[Number, ...]] = {}
    count = 0
    for metric in metrics:
        sample = measured.units([cell_id], metric)
        count = sample.requests
        numbers[metric] = tuple(number(sample, p) for p in CELL_PERCENTILES)
    asked = row.get("requests_asked")
    total = len(measured.requests(cell_id)) if asked is None or asked != asked else int(asked)
    concurrency, rate = row["concurrency"], row.get("request_rate")
    load = f"c={int(concurrency)}" if concurrency == concurrency and concurrency is not None else "open loop"
    if load == "open loop" and isinstance(rate, float) and math.isfinite(rate):
        load = f"{rate:g} req/s"
    return CellRow(
        cell_id=cell_id,
        layout=layout.name,
        kind=layout.kind,
        budget=layout.occupies,
        load=load,
        run=f"{row['restart']}-{row['repeat']}",
        completed=f"{count:,} of {total:,}",
        verdict=row["verdict"] if isinstance(row["verdict"], str) else "unchecked",
        numbers=numbers,
        reasons=tuple(measured.reasons(cell_id)),
    )
