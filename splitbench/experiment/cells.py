# SPDX-License-Identifier: Apache-2.0
"""From an experiment to its cells: which runs there are, how each is keyed, and in which order they go.

A cell's place is the digest of its effective slice, so a changed value never meets an old result and a reverted
one finds its results again.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from splitbench.environment.serving_environment import lock_digest
from splitbench.experiment.models import Experiment, Workload
from splitbench.files import digest
from splitbench.serving.plan import Plan
from splitbench.serving.render import plan_digest, render

# Raised on purpose when the way a cell is measured changes so much that old and new don't compare.
MEASURING_VERSION = 1


@dataclass(frozen=True)
class Cell:
    """One benchmark run: layout x restart x workload x concurrency x repeat."""

    experiment: str
    layout: str
    workload: str
    concurrency: int
    restart: int
    repeat: int
    plan: Plan
    plan_digest: str
    load: Mapping[str, Any]
    model: Mapping[str, Any]
    stack: Mapping[str, Any]
    seed: int

    @property
    def layout_slice(self) -> dict[str, Any]:
        """All that decides what is started."""
        return {"plan_digest": self.plan_digest, "model": dict(self.model), "stack": dict(self.stack)}

    @property
    def workload_slice(self) -> dict[str, Any]:
        """All that decides what is sent, the same for every layout."""
        return dict(self.load)

    @cached_property
    def layout_key(self) -> str:
        """`<layout>-<hash8>`, a folder name."""
        return f"{self.layout}-{digest(self.layout_slice)[:8]}"

    @cached_property
    def workload_key(self) -> str:
        """`<workload>-<hash8>`, a folder name."""
        return f"{self.workload}-{digest(self.workload_slice)[:8]}"

    @property
    def cell_id(self) -> str:
        """The cell's folder below `cells/`, unique within an experiment."""
        return f"{self.layout_key}/{self.workload_key}/c{self.concurrency}/{self.restart}-{self.repeat}"

    @property
    def prompts(self) -> int:
        """Measured requests."""
        rule = self.load["prompts"]
        floor = prompts_for(float(rule["percentile"])) if rule.get("percentile") else 1
        return max(int(rule["minimum"]), floor, int(rule["per_concurrency"]) * self.concurrency)

    @property
    def warmups(self) -> int:
        """Requests sent before the measured ones, with prompts of their own."""
        return int(self.load["warmup_per_concurrency"]) * self.concurrency

    @property
    def slice(self) -> dict[str, Any]:
        """The effective slice: everything that the cell's numbers depend on, as plain data."""
        return {
            "layout": self.layout_slice | {"name": self.layout},
            "workload": self.workload_slice | {"name": self.workload},
            "concurrency": self.concurrency,
            "restart": self.restart,
            "repeat": self.repeat,
            "prompts": self.prompts,
            "warmups": self.warmups,
            "seed": self.seed,
        }

    @cached_property
    def digest(self) -> str:
        """sha256 of the effective slice."""
        return digest(self.slice)


def stack_slice(experiment: Experiment, root: Path) -> dict[str, Any]:
    """What a result depends on in the serving software: the lock's content, or the versions that are stated.

    Raises:
        UserError: the lock can't be read.
    """
    stack = experiment.stack
    if stack.lock is None:
        return {"name": stack.name, "packages": dict(sorted(stack.packages.items()))}
    return {"name": stack.name, "lock_digest": lock_digest(root / stack.lock)}


def model_slice(experiment: Experiment) -> dict[str, Any]:
    """What a result depends on in the model."""
    return experiment.model.model_dump(mode="json", exclude_none=True)


# Fields that came later: a workload that leaves them at their default is what it was before, and keeps its results.
_LATER = (
    "sha256",
    "range_ratio",
    "prefix_tokens",
    "prefixes",
    "request_rate",
    "burstiness",
    "ramp",
)


def load_slice(experiment: Experiment, workload: Workload) -> dict[str, Any]:
    """What a result depends on in the load, apart from the concurrency."""
    # A file counts by its content (sha256), and the caps are an axis of their own.
    load = workload.model_dump(mode="json", exclude={"path", "concurrency"})
    for name in _LATER:
        if load[name] == Workload.model_fields[name].default:
            del load[name]
    if load["prompts"]["percentile"] is None:
        del load["prompts"]["percentile"]
    return load | {"experiment_seed": experiment.seed, "measuring_version": MEASURING_VERSION}


def prompts_for(percentile: float, confidence: float = 0.95) -> int:
    """Fewest independent requests whose largest one bounds a percentile from above at this confidence.

    Closed form of `splitbench.statistics.quantiles.needed`, which is too slow to load here.
    """
    p = percentile / 100
    tail = (1 - confidence) / 2
    return max(math.ceil(math.log(tail) / math.log(p)), math.ceil(math.log(tail) / math.log(1 - p)))


def seed_of(experiment_seed: int, load: Mapping[str, Any], concurrency: int, repeat: int) -> int:
    """The prompts' seed: a function of the load and never of the layout, so that layouts are paired.

    Restarts are left out too: the same prompts after a restart show what the restart alone changes.
    """
    text = f"{experiment_seed}/{digest(dict(load))}/{concurrency}/{repeat}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF


class Cells:
    """All cells of an experiment, with look-ups that rules need."""

    def __init__(self, experiment: Experiment, root: Path) -> None:
        self.experiment = experiment
        stack, model = stack_slice(experiment, root), model_slice(experiment)
        self.plans = {name: render(experiment, name) for name in experiment.layouts}
        digests = {name: plan_digest(experiment, name) for name in experiment.layouts}
        self.all: tuple[Cell, ...] = tuple(
            Cell(
                experiment=experiment.experiment,
                layout=layout,
                workload=workload,
                concurrency=concurrency,
                restart=restart,
                repeat=repeat,
                plan=self.plans[layout],
                plan_digest=digests[layout],
                load=load,
                model=model,
                stack=stack,
                seed=seed_of(experiment.seed, load, concurrency, repeat),
            )
            for layout in experiment.layouts
            for workload, load, caps in (
                (name, load_slice(experiment, spec), spec.concurrency)
                for name, spec in experiment.workloads.items()
            )
            for concurrency in caps or experiment.matrix.concurrency
            for restart in range(experiment.matrix.restarts)
            for repeat in range(experiment.matrix.repeats)
        )
        self._by_id = {cell.cell_id: cell for cell in self.all}
        self._order = {cell.cell_id: index for index, cell in enumerate(self._ordered())}

    def __getitem__(self, cell_id: str) -> Cell:
        return self._by_id[cell_id]

    def __len__(self) -> int:
        return len(self.all)

    @property
    def ids(self) -> list[str]:
        """Cell ids in the config's order."""
        return [cell.cell_id for cell in self.all]

    def order(self, cell_id: str) -> int:
        """The cell's place (from 0) in the recorded random order."""
        return self._order[cell_id]

    def _ordered(self) -> list[Cell]:
        """Blocked random order: a block is one bring-up of one layout; blocks and the cells within are shuffled.

        Or as they are listed, by layout, workload and concurrency.
        """
        listed = self.experiment.matrix.order == "listed"
        shuffle = random.Random(f"order/{self.experiment.seed}")
        ordered: list[Cell] = []
        for restart in range(self.experiment.matrix.restarts):
            layouts = list(self.experiment.layouts)
            if not listed:
                shuffle.shuffle(layouts)
            for layout in layouts:
                block = [cell for cell in self.all if cell.layout == layout and cell.restart == restart]
                if not listed:
                    shuffle.shuffle(block)
                ordered += block
        return ordered
