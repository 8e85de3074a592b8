# SPDX-License-Identifier: Apache-2.0
"""The valid cells of one layout, workload and load, pooled: what verdicts and claims compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from splitbench.serving.plan import Budget
from splitbench.statistics.clusters import Clustered, ClusteredReading, clustered_quantile
from splitbench.statistics.quantiles import Floats

Source = Callable[[Sequence[str], str], Clustered]
"""Gives the values of a metric of some cells (by id) with the units that vary independently."""


@dataclass(frozen=True)
class Arm:
    """What of a layout decides whom it is compared with."""

    name: str
    kind: str
    budget_kind: Literal["cores", "gpus"]
    budget: int
    first_token: str | None
    share: str | None = None

    @property
    def occupies(self) -> str:
        """Budget, and how engines share it: `4 GPUs`, `1 GPU, time-sliced`."""
        budget = str(Budget(kind=self.budget_kind, count=self.budget))
        return f"{budget}, {self.share}" if self.share else budget


@dataclass(frozen=True)
class Pool:
    """Cells of one layout, workload and load.

    Attributes:
        cells: ids of the valid ones.
        invalid: ids of the others.
        restarts: server starts among the valid ones.
    """

    cells: tuple[str, ...]
    invalid: tuple[str, ...]
    restarts: int


def held(sample: Clustered) -> Clustered:
    """The same sample in memory: statistics pass over their values many times."""
    chunks = list(sample.values())
    return Clustered(lambda: chunks, sample.units, sample.level, sample.requests)


def values_of(sample: Clustered) -> Floats:
    """All values of a sample, without their units."""
    chunks = [np.asarray(values, dtype=np.float64) for values, _ in sample.values()]
    return np.concatenate(chunks) if chunks else np.empty(0)


class Pools:
    """All cells of an experiment by workload, layout and load, with samples on demand.

    Args:
        cells: rows of the cells table.
        source: gives the values of some cells.
    """

    def __init__(self, cells: Iterable[Mapping[str, Any]], source: Source) -> None:
        self._source = source
        self._samples: dict[tuple[str, str, float, str], Clustered | None] = {}
        self._readings: dict[tuple[str, str, float, str, float], ClusteredReading | None] = {}
        self.arms: dict[str, Arm] = {}
        self.input_tokens: dict[str, int] = {}
        self.output_tokens: dict[str, int] = {}
        groups: dict[tuple[str, str, float], list[Mapping[str, Any]]] = {}
        for row in cells:
            load = row["concurrency"] if row["concurrency"] is not None else row.get("request_rate")
            if load is None:
                continue
            groups.setdefault((row["workload"], row["layout"], float(load)), []).append(row)
            self.arms.setdefault(
                row["layout"],
                Arm(
                    row["layout"],
                    row["kind"],
                    row["budget_kind"],
                    int(row["budget"]),
                    row["first_token"],
                    row.get("share"),
                ),
            )
            for tokens, key in ((self.input_tokens, "input"), (self.output_tokens, "output")):
                if row.get(f"{key}_tokens_asked") is not None:
                    tokens[row["workload"]] = int(row[f"{key}_tokens_asked"])
        self._pools = {
            place: Pool(
                tuple(row["cell_id"] for row in rows if row["verdict"] != "invalid"),
                tuple(row["cell_id"] for row in rows if row["verdict"] == "invalid"),
                len({row["restart"] for row in rows if row["verdict"] != "invalid"}),
            )
            for place, rows in groups.items()
        }

    @classmethod
    def from_parts(cls, cells: Sequence[Mapping[str, Any]], parts: Sequence[Path]) -> Pools:
        """From the cells table's rows and the folders of their parts, in the same order."""
        from splitbench.tables import dataset  # it needs `clusters`, and so this package, itself

        places = {row["cell_id"]: part for row, part in zip(cells, parts, strict=True)}

        def source(ids: Sequence[str], metric: str) -> Clustered:
            folders = [places[cell_id] for cell_id in ids]
            if metric == "itl_ms":
                return dataset.clustered_itls(folders)
            return dataset.clustered_requests(folders, metric)

        return cls(cells, source)

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(workload for workload, _, _ in self._pools))

    def loads(self, workload: str, layout: str, *, valid: bool = True) -> list[float]:
        """Loads that a layout has (valid) cells at, ascending."""
        return sorted(
            load
            for (w, name, load), pool in self._pools.items()
            if (w, name) == (workload, layout) and (pool.cells or not valid)
        )

    def pool(self, workload: str, layout: str, load: float) -> Pool:
        """The cells at one place; empty where nothing was measured."""
        return self._pools.get((workload, layout, load), Pool((), (), 0))

    def sample(self, workload: str, layout: str, load: float, metric: str) -> Clustered | None:
        """Values of the valid cells; None where there are none, or the source recorded no such latency."""
        place = (workload, layout, load, metric)
        if place not in self._samples:
            cells = self.pool(workload, layout, load).cells
            found = held(self._source(cells, metric)) if cells else None
            usable = found is not None and any(len(values) for values, _ in found.values())
            self._samples[place] = found if usable else None
        return self._samples[place]

    def reading(
        self, workload: str, layout: str, load: float, metric: str, p: float
    ) -> ClusteredReading | None:
        """A quantile with its interval; None where there is no valid cell."""
        place = (workload, layout, load, metric, p)
        if place not in self._readings:
            sample = self.sample(workload, layout, load, metric)
            self._readings[place] = clustered_quantile(sample, p) if sample is not None else None
        return self._readings[place]

    def release(self, workload: str) -> None:
        """Forget the samples of a workload: token values of many cells take memory."""
        self._samples = {place: kept for place, kept in self._samples.items() if place[0] != workload}
