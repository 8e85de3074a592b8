# SPDX-License-Identifier: Apache-2.0
"""What the machine did while a cell was measured: processes, processors, GPUs and engines' gauges, about once a second.

One thread reads /proc, which costs well below a thousandth of a core. Engines' /metrics pages are another matter:
an engine renders them in the loop that also sends tokens, so how often they are asked for is set apart.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitbench.measuring.evidence import Series
from splitbench.measuring.gpus import Gpus
from splitbench.measuring.scrape import GAUGES
from splitbench.serving.processes import Stat, all_processes, descendants

FAMILY_REFRESH_S = 10.0
"""Engines have their processes before they are ready; a new one is found at the latest after this."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
Scrape = Callable[[], Mapping[str, Mapping[str, float]]]
"""Gives each server's metrics by its source; may be empty."""


@dataclass
class _Family:
    """A process and its descendants."""

    pid: int
    members: list[int] = field(default_factory=list)
    cpu_s: float | None = None
    sampled_s: float = 0.0


@dataclass(frozen=True)
class _Cpu:
    """Processor time of the whole machine, in seconds since it started."""

    total: float
    idle: float
    steal: float


class Sampler:
    """Samples in a thread of its own from `start` to `stop`.

    Args:
        roots: processes to watch with their descendants, by source as in the `telemetry` table.
        ours: further processes of this measurement, not shown but not counted as others'.
        interval_s: between samples.
        scrape: gives gauges of the servers; None: they are not asked.
        scrape_interval_s: how often, at most.
        gpus: the devices of the layout; None: there are none.
    """

    def __init__(
        self,
        roots: Mapping[str, int],
        *,
        ours: Iterable[int] = (),
        interval_s: float = 1.0,
        scrape: Scrape | None = None,
        scrape_interval_s: float = 1.0,
        gpus: Gpus | None = None,
    ) -> None:
        self._families = {source: _Family(pid) for source, pid in roots.items()}
        self._ours = [_Family(pid) for pid in ours]
        self._interval_s = interval_s
        self._scrape = scrape
        self._scrape_interval_s = scrape_interval_s
        self._scraped_s = -1e9
        self._gpus = gpus
        self._refreshed_s = -1e9
        self._samples: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self._machine: tuple[float, _Cpu, float] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._zero_s = time.perf_counter()
        self.cpu_s = 0.0

    def start(self) -> None:
        """Begin; times count from here."""
        self._zero_s = time.perf_counter()
        self._thread.start()

    def watch_client(self, pid: int) -> None:
        """From now on this is the client."""
        self._families["client"] = _Family(pid, [pid])

    def stop(self) -> list[Series]:
        """End, and give all samples."""
        self._stop.set()
        self._thread.join()
        return [
            Series(source, metric, [t for t, _ in points], [v for _, v in points])
            for (source, metric), points in sorted(self._samples.items())
        ]

    def _run(self) -> None:
        next_s = time.perf_counter()
        while True:
            self.sample()
            self.cpu_s = time.thread_time()
            next_s = max(next_s + self._interval_s, time.perf_counter())
            if self._stop.wait(next_s - time.perf_counter()):
                return

    def sample(self) -> None:
        """One round of samples, now."""
        now_s = time.perf_counter()
        moment_s = now_s - self._zero_s
        if now_s - self._refreshed_s > FAMILY_REFRESH_S:
            self._refreshed_s = now_s
            self._refresh()
        used_s = sum(
            self._sample_family(source, family, now_s, moment_s)
            for source, family in list(self._families.items())
        )
        used_s += sum(self._used(family, now_s) for family in self._ours)
        self._sample_machine(now_s, moment_s, used_s)
        if self._gpus is not None:
            for index, metric, value in self._gpus.sample():
                self._add(f"gpu:{index}", metric, moment_s, value)
        if self._scrape is not None and now_s - self._scraped_s >= self._scrape_interval_s:
            self._scraped_s = now_s
            for source, metrics in self._scrape().items():
                for metric, value in gauges(metrics):
                    self._add(source, metric, moment_s, value)

    def _add(self, source: str, metric: str, moment_s: float, value: float) -> None:
        self._samples[source, metric].append((round(moment_s, 3), value))

    def _sample_family(self, source: str, family: _Family, now_s: float, moment_s: float) -> float:
        before_s, since_s = family.cpu_s, family.sampled_s
        used_s = self._used(family, now_s)
        if before_s is not None and now_s > since_s and used_s:
            self._add(
                source, "cpu_percent", moment_s, round(100 * (used_s - before_s) / (now_s - since_s), 2)
            )
        stats = [_stat(pid) for pid in family.members]
        rss = sum(int(fields[21]) * _PAGE_BYTES for fields in stats if fields)
        if rss:
            self._add(source, "rss_mib", moment_s, round(rss / 2**20, 1))
        # Stopped by a signal or a debugger: only said where it is so.
        if stopped := sum(fields[0] in (b"T", b"t") for fields in stats if fields):
            self._add(source, "stopped_processes", moment_s, stopped)
        return used_s

    def _refresh(self) -> None:
        """Find out who belongs to which family, with one look at all processes."""
        table = all_processes()
        for family in (*self._families.values(), *self._ours):
            family.members = members(family.pid, table)

    @staticmethod
    def _used(family: _Family, now_s: float) -> float:
        """Processor seconds of a family so far."""
        used_s = sum(_cpu_s(pid) for pid in family.members)
        family.cpu_s, family.sampled_s = used_s, now_s
        return used_s

    def _sample_machine(self, now_s: float, moment_s: float, used_s: float) -> None:
        cpu = _machine_cpu()
        if self._machine is not None:
            before_s, before, used_before_s = self._machine
            total = cpu.total - before.total
            if total > 0 and now_s > before_s:
                busy_s = total - (cpu.idle - before.idle) - (cpu.steal - before.steal)
                others_s = max(0.0, busy_s - (used_s - used_before_s))
                self._add("host", "cpu_percent", moment_s, round(100 * busy_s / (now_s - before_s), 2))
                # A client that began or ended in between makes the difference of ours meaningless.
                if used_s >= used_before_s:
                    percent = round(100 * others_s / (now_s - before_s), 2)
                    self._add("host", "others_cpu_percent", moment_s, percent)
                steal = 100 * (cpu.steal - before.steal) / total
                self._add("host", "steal_percent", moment_s, round(steal, 3))
        self._machine = (now_s, cpu, used_s)


def gauges(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """The few gauges that are kept over time, summed over labels."""
    sums: dict[str, float] = {}
    for series, value in metrics.items():
        name = series.partition("{")[0]
        if name in GAUGES:
            short = name.removeprefix("vllm:")
            sums[short] = sums.get(short, 0.0) + value
    return list(sums.items())


def members(pid: int, table: dict[int, Stat] | None = None) -> list[int]:
    """A process and all that descend from it; empty when it is gone."""
    table = all_processes() if table is None else table
    return [pid, *(stat.pid for stat in descendants(pid, table))] if pid in table else []


def _stat(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the state on (field 3 of proc(5) is the first here)."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if fields else 0.0


def _machine_cpu() -> _Cpu:
    with Path("/proc/stat").open("rb") as handle:
        ticks = [int(value) for value in handle.readline().split()[1:9]]
    # user nice system idle iowait irq softirq steal
    return _Cpu(*(value / _TICKS_PER_S for value in (sum(ticks), ticks[3] + ticks[4], ticks[7])))


# -- with the cell -------------------------------------------------------------------------------------------
def to_json(series: Iterable[Series]) -> list[dict[str, Any]]:
    """Series as plain data."""
    return [
        {"source": s.source, "metric": s.metric, "time_s": list(s.times_s), "value": list(s.values)}
        for s in series
    ]


def from_json(content: Iterable[Mapping[str, Any]]) -> list[Series]:
    """The reverse of `to_json`."""
    return [Series(each["source"], each["metric"], each["time_s"], each["value"]) for each in content]
