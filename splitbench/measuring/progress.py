# SPDX-License-Identifier: Apache-2.0
"""How far a run is: which cell of how many, for how long, and about how long still."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """What decides how long a cell takes: its layout, its workload, and how many requests at which concurrency."""

    layout: str
    workload: str
    concurrency: int
    requests: int


def estimate_s(load: Load, done: Mapping[Load, float]) -> float | None:
    """Seconds a cell is expected to take, from those already measured; None when nothing was measured.

    The nearest measured cell gives its seconds per request: the same workload and concurrency in another layout first,
    then the same workload, then any.
    """

    def distance(other: Load) -> tuple[bool, bool, float]:
        return (
            other.workload != load.workload,
            other.layout != load.layout,
            abs(other.concurrency - load.concurrency),
        )

    if not done:
        return None
    nearest = min(done, key=distance)
    return done[nearest] * load.requests / max(1, nearest.requests)


def remaining_s(todo: Sequence[Load], done: Mapping[Load, float]) -> float | None:
    """Seconds that the cells to come are expected to take; None when nothing was measured yet."""
    estimates = [estimate_s(load, done) for load in todo]
    known = [estimate for estimate in estimates if estimate is not None]
    return sum(known) if len(known) == len(todo) else None


def clock(seconds: float) -> str:
    """Seconds as 1:05 or 2:03:09."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def progress_line(
    position: int, total: int, load: Load, elapsed_s: float, left_s: float | None, *, repeat: str = ""
) -> str:
    """The line a person follows.

    Args:
        position: of the cell that starts, from 1.
        total: cells of the experiment.
        load: what this cell is.
        elapsed_s: since the workflow started.
        left_s: expected for this cell and those after it.
        repeat: restart and repeat, where there is more than one.
    """
    left = "time left not known yet" if left_s is None else f"about {clock(left_s)} left"
    name = " ".join(part for part in (load.layout, load.workload, f"c={load.concurrency}", repeat) if part)
    return f"cell {position}/{total}: {name}, {load.requests} requests | {clock(elapsed_s)} gone, {left}"
