# SPDX-License-Identifier: Apache-2.0
"""Two archives side by side: what was another machine or software, what came out differently, which claims changed.

Cells are paired by name (layout, workload, concurrency), so that two machines or dates can be compared; whether their
slices are the same too is said. The interval of a difference is made from the two intervals by the MOVER rule
(Zou and Donner 2008), which keeps their asymmetry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from splitbench.archive.bag import PAYLOAD
from splitbench.archive.unpack import LIMITS, Limits, gunzip_all
from splitbench.archive.verify import unpacked
from splitbench.environment.probe import compared
from splitbench.errors import ARCHIVE, UserError, damage
from splitbench.figures.measured import Measured, Metric
from splitbench.files import read_json
from splitbench.report.content import Effect, effects
from splitbench.statistics.clusters import clustered_quantile
from splitbench.statistics.quantiles import Interval

METRICS: tuple[tuple[Metric, float], ...] = (
    ("itl_ms", 50.0),
    ("itl_ms", 99.0),
    ("ttft_ms", 50.0),
    ("ttft_ms", 99.0),
)
# Facts that differ between any two runs and say nothing about the software or the machine.
_UNIMPORTANT = (
    "serving.seconds",
    "serving.install_s",
    "serving.import_s",
    "memory.shm_bytes",
    "machine.memory.shm_bytes",
)


@dataclass(frozen=True)
class Reading:
    """A percentile of one side: value in ms, ends of its 95 % interval (None: the sample can't give it), support."""

    value: float | None
    low: float | None
    high: float | None
    requests: int
    supported: bool


@dataclass(frozen=True)
class Difference:
    """One percentile of one load, B minus A, in ms; `low` and `high` are None where a side has no interval."""

    layout: str
    workload: str
    concurrency: int
    metric: str
    percentile: float
    a: Reading
    b: Reading
    change: float | None
    low: float | None
    high: float | None
    differs: bool | None


@dataclass(frozen=True)
class Comparison:
    """What two archives show against each other.

    Attributes:
        environment: key, value in A, value in B.
        slices: names of loads whose effective slices differ, and in which keys.
        only: loads that one side alone has, with that side.
        cells: per load and percentile.
        claims: claims that both make and that came out differently.
    """

    a: str
    b: str
    environment: list[tuple[str, Any, Any]]
    slices: list[tuple[str, list[str]]]
    only: list[tuple[str, str]]
    cells: list[Difference]
    claims: list[dict[str, Any]]


class _Side:
    def __init__(self, tree: Path) -> None:
        self.index = read_json(tree / "archive.json")
        results = tree / "results" / self.index["experiment"]
        self.results = results
        self.environment = read_json(tree / self.index["environment"]["probe"])
        self.statistics = read_json(results / "statistics.json")
        folders = [results / "parts" / cell["id"] for cell in self.index["cells"]]
        self.measured = Measured.from_folders(folders)
        self.loads: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        for cell in self.index["cells"]:
            self.loads.setdefault((cell["layout"], cell["workload"], cell["concurrency"]), []).append(cell)

    def slice(self, load: tuple[str, str, int]) -> dict[str, Any]:
        return read_json(self.results / "cells" / self.loads[load][0]["id"] / "cell.json")

    def reading(self, load: tuple[str, str, int], metric: Metric, percentile: float) -> Reading:
        """A percentile over the load's valid cells; over all where none is valid, then unsupported."""
        rows = self.measured.cells.set_index("cell_id")["verdict"]
        ids = [cell["id"] for cell in self.loads[load]]
        valid = [cell for cell in ids if rows.get(cell) != "invalid"]
        found = clustered_quantile(self.measured.units(valid or ids, metric), percentile / 100)
        return Reading(
            _finite(found.value),
            _finite(found.interval.low),
            _finite(found.interval.high),
            found.gate.n,
            bool(valid) and found.gate.supported,
        )

    def verdict(self, load: tuple[str, str, int]) -> str:
        rows = self.measured.cells.set_index("cell_id")["verdict"]
        found = {str(rows.get(cell["id"])) for cell in self.loads[load]}
        return next((word for word in ("invalid", "warn") if word in found), "ok")


@damage(*ARCHIVE)
def compare(a: Path, b: Path, limits: Limits = LIMITS) -> Comparison:
    """Compare two archives.

    Raises:
        UserError: one is no archive, or they share no load.
    """
    with ExitStack() as stack:
        sides = []
        for path in (a, b):
            bag, broken = stack.enter_context(unpacked(path, limits))
            if broken:
                raise UserError(
                    f"{broken[0][0]} {broken[0][1]}", where=str(path), mend="run `splitbench verify` on it"
                )
            gunzip_all(bag / PAYLOAD / "results", limits)
            sides.append(_Side(bag / PAYLOAD))
        return _compared(a.name, b.name, *sides)


def _compared(name_a: str, name_b: str, a: _Side, b: _Side) -> Comparison:
    shared = [load for load in a.loads if load in b.loads]
    if not shared:
        raise UserError(
            "the two share no layout, workload and concurrency",
            where=f"{name_a}, {name_b}",
            mend="compare runs of one experiment",
        )
    only = [(_load(load), name_a) for load in a.loads if load not in b.loads]
    only += [(_load(load), name_b) for load in b.loads if load not in a.loads]
    slices = []
    for load in shared:
        keys = [key for key, _, _ in differences(_named(a.slice(load)), _named(b.slice(load)))]
        if keys:
            slices.append((_load(load), keys))
    environment = [found for found in differences(*_comparable(a, b)) if found[0] not in _UNIMPORTANT]
    cells = [
        difference(
            load, metric, percentile, a.reading(load, metric, percentile), b.reading(load, metric, percentile)
        )
        for load in shared
        for metric, percentile in METRICS
    ]
    return Comparison(name_a, name_b, environment, slices, only, cells, list(_claims(a, b, shared)))


def _comparable(a: _Side, b: _Side) -> tuple[dict[str, Any], dict[str, Any]]:
    """What environments are told apart by; whole records where a side has an older one."""
    records = (a.environment, b.environment)
    if all("schema" in record for record in records):
        return compared(records[0]), compared(records[1])
    return records


def _named(slice_: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in slice_.items()
        if key not in ("digest", "experiment", "seed", "prompts", "warmups")
    }


def _load(load: tuple[str, str, int]) -> str:
    return f"{load[0]}, {load[1]}, c={load[2]}"


def differences(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves of two JSON values that differ: key, value in a, value in b; None where one side lacks it."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in sorted(a.keys() | b.keys()):
            yield from differences(a.get(name), b.get(name), f"{key}.{name}" if key else str(name))
    elif a != b:
        yield key, a, b


def difference(
    load: tuple[str, str, int], metric: str, percentile: float, a: Reading, b: Reading
) -> Difference:
    """B minus A with its interval; no interval where a side's sample can't give one."""
    change = low = high = None
    differs = None
    if a.value is not None and b.value is not None:
        change = b.value - a.value
        if a.low is not None and a.high is not None and b.low is not None and b.high is not None:
            interval = mover((a.value, a.low, a.high), (b.value, b.low, b.high))
            low, high = interval.low, interval.high
            if a.supported and b.supported:
                differs = low > 0 or high < 0
    return Difference(*load, metric, percentile, a, b, change, low, high, differs)


def mover(a: tuple[float, float, float], b: tuple[float, float, float]) -> Interval:
    """Interval of b - a from two independent estimates, each as value, low, high."""
    (x, x_low, x_high), (y, y_low, y_high) = a, b
    change = y - x
    return Interval(
        change - math.hypot(y - y_low, x_high - x), change + math.hypot(y_high - y, x - x_low), 0.95
    )


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _claims(a: _Side, b: _Side, shared: list[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
    for load in shared:
        old, new = a.verdict(load), b.verdict(load)
        if old != new:
            yield {"claim": f"checks of {_load(load)}", "a": old, "b": new}
    if a.statistics["slo"] == b.statistics["slo"]:
        loads = [
            {
                (found["layout"], found["workload"]): found["concurrency"]
                for found in side.statistics["highest_load"]
            }
            for side in (a, b)
        ]
        for key in (key for key in loads[0] if key in loads[1]):
            if loads[0][key] != loads[1][key]:
                yield {
                    "claim": f"highest concurrency of {key[0]}, {key[1]} within the SLO",
                    "a": loads[0][key],
                    "b": loads[1][key],
                }
    yield from _judged(a, b)
    yield from _ranks(effects(a.measured), effects(b.measured))


def _judged(a: _Side, b: _Side) -> Iterator[dict[str, Any]]:
    """The config's claims and the verdicts, where both sides have one of the same name."""
    outcomes = []
    for side in (a, b):
        found = {f"claim '{claim['claim']}'": claim["outcome"] for claim in side.statistics.get("claims", [])}
        for verdict in side.statistics.get("verdicts", []):
            name = f"verdict on {verdict['layout']} against {verdict['reference']}, {verdict['workload']}"
            found[name] = verdict["outcome"]
        outcomes.append(found)
    for name, outcome in outcomes[0].items():
        if name in outcomes[1] and outcome != outcomes[1][name]:
            yield {"claim": name, "a": outcome, "b": outcomes[1][name]}


def _ranks(a: list[Effect], b: list[Effect]) -> Iterator[dict[str, Any]]:
    """Which layout's tail is lowest at the highest load that both archives speak about."""
    others = {(effect.workload, effect.budget, effect.high): effect for effect in b}
    for effect in a:
        other = others.get((effect.workload, effect.budget, effect.high))
        if other is None:
            continue
        (best_a, sure_a), (best_b, sure_b) = _lowest(effect), _lowest(other)
        if best_a and best_b and best_a != best_b:
            yield {
                "claim": f"lowest P{effect.percentile:g} ITL at c={effect.high}, {effect.workload}, "
                f"within {effect.budget}",
                "a": f"{best_a}{'' if sure_a else ' (not supported)'}",
                "b": f"{best_b}{'' if sure_b else ' (not supported)'}",
            }


def _lowest(effect: Effect) -> tuple[str, bool]:
    found = sorted(
        (
            (growth.high.value_ms, growth)
            for growth in effect.growths
            if growth.high is not None and math.isfinite(growth.high.value_ms)
        ),
        key=lambda pair: pair[0],
    )
    if len(found) < 2:
        return "", False
    (_, first), (_, second) = found[:2]
    sure = bool(
        first.high
        and second.high
        and first.high.supported
        and second.high.supported
        and first.high.interval.high < second.high.interval.low
    )
    return first.layout.name, sure


def as_json(found: Comparison) -> str:
    """The comparison as JSON."""
    return json.dumps(asdict(found), indent=2, ensure_ascii=False) + "\n"


def words(found: Comparison) -> str:
    """The comparison as a person reads it; changes are B minus A."""
    lines = [f"A: {found.a}", f"B: {found.b}", ""]
    lines.append(f"Environment: {len(found.environment)} difference(s)")
    lines += [f"  {key}: {_value(old)} -> {_value(new)}" for key, old, new in found.environment]
    lines.append(f"Slices: {len(found.slices)} load(s) were measured with another slice")
    lines += [f"  {load}: {', '.join(keys)}" for load, keys in found.slices]
    lines += [f"  {load}: only in {side}" for load, side in found.only]
    sure = sum(cell.differs is True for cell in found.cells)
    lines.append(f"Cells: {len(found.cells)} percentiles, {sure} differ beyond their 95 % intervals")
    for cell in found.cells:
        lines.append(f"  {_load((cell.layout, cell.workload, cell.concurrency))}: {_change(cell)}")
    lines.append(f"Claims: {len(found.claims)} changed")
    lines += [f"  {claim['claim']}: {_value(claim['a'])} -> {_value(claim['b'])}" for claim in found.claims]
    return "\n".join(lines) + "\n"


def _change(cell: Difference) -> str:
    name = f"P{cell.percentile:g} {cell.metric.removesuffix('_ms').upper()}"
    if cell.change is None or cell.a.value is None or cell.b.value is None:
        return f"{name} has no value on one side"
    text = f"{name} {cell.a.value:.2f} -> {cell.b.value:.2f} ms, {cell.change:+.2f}"
    if cell.low is None:
        return f"{text} (no interval: {min(cell.a.requests, cell.b.requests)} requests)"
    text += f" [{cell.low:+.2f}, {cell.high:+.2f}]"
    if cell.differs is None:
        return f"{text} (not supported)"
    return f"{text}{' *' if cell.differs else ''}"


def _value(value: Any) -> str:
    return "nothing" if value is None else str(value)
