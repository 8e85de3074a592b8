# SPDX-License-Identifier: Apache-2.0
"""Before anything runs: how many cells, how long, how many accelerator hours, and whether the samples suffice.

Seconds of a cell come from the nearest cell measured before (`progress.estimate_s`), else from the rates that the
config states: a cell's prompts are prefilled one after the other, and its answers decoded in waves of the
concurrency. Starts of a layout are counted once per restart that still has cells to measure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from splitbench.experiment.cells import Cell
from splitbench.experiment.models import Experiment
from splitbench.measuring.progress import clock, estimate_s
from splitbench.measuring.stage import is_measured, load_of, measured_before
from splitbench.statistics.quantiles import needed
from splitbench.workflow import Workflow


@dataclass(frozen=True)
class Support:
    """Samples of one workload at one load against a percentile.

    Attributes:
        requests: of one layout, all repeats and restarts together.
        needs: how many the percentile asks for.
        runs: repeats times restarts.
        prompts_needed: per run, so that the percentile is supported.
    """

    workload: str
    concurrency: int
    percentile: float
    requests: int
    needs: int
    runs: int

    @property
    def supported(self) -> bool:
        return self.requests >= self.needs

    @property
    def prompts_needed(self) -> int:
        return -(-self.needs // self.runs)

    @property
    def text(self) -> str:
        """`c=32 gives 320 requests; P99 needs 368`, and what to do about it."""
        line = f"{self.workload}: c={self.concurrency} gives {self.requests:,} requests"
        if self.runs > 1:
            line += f" in {self.runs} runs"
        line += f"; P{self.percentile:g} needs {self.needs:,}"
        if self.supported:
            return line
        per = -(-self.prompts_needed // self.concurrency)
        how = f"prompts: {{per_concurrency: {per}}}, or {{percentile: {self.percentile:g}}}"
        return f"{line}: send {self.prompts_needed:,} prompts or more in a run ({how})"


@dataclass(frozen=True)
class Estimate:
    """What a run of the experiment asks for.

    Attributes:
        cells, todo: all cells, and those still to be measured.
        seconds: of the cells to be measured and the starts; None where nothing tells.
        accelerator_hours: by what the budget counts (`gpus`, `cores`); empty where seconds are not known.
        starts: bring-ups that are still to come.
        source: what the seconds rest on: `cells`, `rates` or `nothing`.
        support: per workload, load and percentile.
        runs: repeats times restarts; fewer than three decide no verdict.
        restarts: of each layout.
    """

    cells: int
    todo: int
    seconds: float | None
    accelerator_hours: dict[str, float]
    starts: int
    source: str
    support: tuple[Support, ...]
    runs: int
    restarts: int

    def lines(self) -> Iterable[str]:
        """For a person, a line a fact."""
        yield f"{self.todo} of {self.cells} cells are to be measured, with {self.starts} starts of a layout"
        if self.todo and self.seconds is None:
            yield (
                "wall time: not known; measure one cell, or state rates.prefill_tokens_per_s and "
                "rates.itl_ms in the config"
            )
        elif self.todo and self.seconds is not None:
            basis = "cells measured before" if self.source == "cells" else "the stated rates"
            hours = ", ".join(
                f"{hours:.2f} {kind.removesuffix('s').replace('gpu', 'GPU')} hours"
                for kind, hours in sorted(self.accelerator_hours.items())
            )
            yield f"wall time: about {clock(self.seconds)} by {basis}; {hours}"
        weak = [one for one in self.support if not one.supported]
        good = len(self.support) - len(weak)
        yield f"samples: {good} of {len(self.support)} pairs of load and percentile have enough requests"
        yield from (f"  {one.text}" for one in weak)
        if self.runs < 3 or self.restarts < 2:
            yield (
                f"a verdict asks for 3 runs over 2 or more server starts; this gives {self.runs} over "
                f"{self.restarts}: set matrix.restarts to 3"
            )


def estimate(flow: Workflow) -> Estimate:
    """Estimate what is left of an experiment, from its results so far or from stated rates."""
    experiment = flow.experiment
    todo = [cell for cell in flow.cells.all if not is_measured(flow, cell)]
    done, _ = measured_before(flow)
    seconds = 0.0
    hours: dict[str, float] = {}
    known = True
    for cell in todo:
        taken = estimate_s(load_of(cell), done) if done else _by_rates(cell, experiment)
        if taken is None:
            known = False
            break
        seconds += taken
        _occupy(hours, cell, taken)
    starts = {(cell.layout, cell.restart): cell for cell in todo}
    for cell in starts.values():
        seconds += experiment.rates.startup_s
        _occupy(hours, cell, experiment.rates.startup_s)
    matrix = experiment.matrix
    return Estimate(
        cells=len(flow.cells),
        todo=len(todo),
        seconds=seconds if known else None,
        accelerator_hours=hours if known else {},
        starts=len(starts),
        source="nothing" if not known else "cells" if done else "rates",
        support=tuple(_support(flow)),
        runs=matrix.restarts * matrix.repeats,
        restarts=matrix.restarts,
    )


def _occupy(hours: dict[str, float], cell: Cell, seconds: float) -> None:
    budget = cell.plan.budget
    hours[budget.kind] = hours.get(budget.kind, 0.0) + budget.count * seconds / 3600


def _by_rates(cell: Cell, experiment: Experiment) -> float | None:
    rates = experiment.rates
    if rates.prefill_tokens_per_s is None or rates.itl_ms is None:
        return None
    requests = cell.prompts + cell.warmups
    prefill = requests * int(cell.load["input_tokens"]) / rates.prefill_tokens_per_s
    waves = requests / cell.concurrency
    busy = prefill + waves * int(cell.load["output_tokens"]) * rates.itl_ms / 1000
    # An open loop takes at least as long as its requests take to be offered.
    offered = cell.load.get("request_rate")
    return busy if offered is None else max(busy, cell.prompts / float(offered))


def wanted_percentiles(experiment: Experiment) -> list[float]:
    """Percentiles that the SLO, the figures and the claims ask for."""
    found = {experiment.slo.percentile}
    for settings in experiment.figures.values():
        found.update(settings.percentiles)
    for claim in experiment.claims.values():
        for test in claim.tests:
            found.update(float(name[1:]) for name in test.statistic if name != "mean")
            found.update(test.between[:1] if test.between else ())
    return sorted(found)


def _support(flow: Workflow) -> Iterable[Support]:
    matrix = flow.experiment.matrix
    runs = matrix.restarts * matrix.repeats
    first = next(iter(flow.experiment.layouts))
    for cell in flow.cells.all:
        if cell.layout != first or cell.restart or cell.repeat:
            continue
        for percentile in wanted_percentiles(flow.experiment):
            yield Support(
                workload=cell.workload,
                concurrency=cell.concurrency,
                percentile=percentile,
                requests=cell.prompts * runs,
                needs=needed(percentile / 100),
                runs=runs,
            )
