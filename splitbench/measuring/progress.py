# SPDX-License-Identifier: Apache-2.0
"""How far a run is: which cell of how many, for how long, and about how long still."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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


@dataclass(frozen=True)
class Live:
    """Where the current cell is, as its client says.

    Attributes:
        done, failed: requests that have ended, and those of them with an error.
        of: requests of this phase.
        phase: `warm-up`; empty while it is measured.
        ttft_ms, itl_ms: medians over the requests in flight lately; None before the first token. For a person who
            waits: no check has seen them.
    """

    done: int
    of: int
    phase: str = ""
    failed: int = 0
    ttft_ms: float | None = None
    itl_ms: float | None = None

    def text(self, *, short: bool = False) -> str:
        """`12/44 requests, TTFT 523 ms, ITL 23 ms`; short: without the word."""
        phase = f"{self.phase}: " if self.phase else ""
        parts = [f"{phase}{self.done}/{self.of}" + ("" if short else " requests")]
        if self.failed:
            parts.append(f"{self.failed} FAILED")
        for name, value in (("TTFT", self.ttft_ms), ("ITL", self.itl_ms)):
            if value is not None:
                parts.append(f"{name} {value:.0f} ms" if value >= 10 else f"{name} {value:.1f} ms")
        return ", ".join(parts)


@dataclass(frozen=True)
class Standing:
    """Where a run stands when a cell starts.

    Attributes:
        position, total: of the cell, from 1, and how many there are.
        load: what the cell is.
        repeat: restart and repeat, where there is more than one.
        elapsed_s: since the workflow started.
        later: cells that come after this one.
        done: seconds of those that were measured.
    """

    position: int
    total: int
    load: Load
    repeat: str
    elapsed_s: float
    later: Sequence[Load] = ()
    done: Mapping[Load, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`agg long c=4`."""
        load = self.load
        return " ".join(
            part for part in (load.layout, load.workload, f"c={load.concurrency}", self.repeat) if part
        )

    def left_s(self, spent_s: float = 0.0, whole_s: float | None = None) -> float | None:
        """Seconds until all cells are expected to be measured; None when nothing tells.

        Args:
            spent_s: on this cell so far.
            whole_s: what this cell is expected to take by how far it is; None: by the cells before it.
        """
        done = self.done if whole_s is None else {**self.done, self.load: whole_s}
        this_s, later_s = estimate_s(self.load, done), remaining_s(self.later, done)
        return None if this_s is None or later_s is None else max(0.0, this_s - spent_s) + later_s

    def line(self, spent_s: float = 0.0, live: Live | None = None, whole_s: float | None = None) -> str:
        """The line a person follows: at the cell's start, and while it runs."""
        left_s = self.left_s(spent_s, whole_s)
        left = "time left not known yet" if left_s is None else f"about {clock(left_s)} left"
        name = f"cell {self.position}/{self.total}: {self.name}"
        if live is None:
            return f"{name}, {self.load.requests} requests | {clock(self.elapsed_s)} gone, {left}"
        return f"{name} | {live.text()} | {clock(self.elapsed_s + spent_s)} gone, {left}"

    def short_line(self, spent_s: float, live: Live, whole_s: float | None = None) -> str:
        """The same for a terminal of 80 columns: `3/16, 2:05 left | agg long c=4 | 12/40, TTFT 523 ms, ITL 23 ms`."""
        left_s = self.left_s(spent_s, whole_s)
        left = "? left" if left_s is None else f"{clock(left_s)} left"
        return f"{self.position}/{self.total}, {left} | {self.name} | {live.text(short=True)}"
