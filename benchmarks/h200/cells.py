# SPDX-License-Identifier: Apache-2.0
"""Which files a part of an experiment is: python cells.py CONFIG environment|model|cells|complete [ARGUMENT]

environment      the record of machine and software, the model, the plans
model            the model's folder
cells SELECTION  LAYOUT[:WORKLOAD[:CONCURRENCY[,CONCURRENCY]]] -> the cells' records, a line each
complete FILE    write a config that holds only what has been measured, so that tables and figures can be made of it
Run by the workflow's interpreter in the repository.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import yaml

from splitbench.experiment.cells import Cell
from splitbench.experiment.load import read_yaml
from splitbench.workflow import Workflow


def selected(flow: Workflow, selection: str) -> list[Cell]:
    """Cells of a layout, a workload and some concurrencies, in the order in which they are measured."""
    layout, workload, loads = (*selection.split(":"), "", "")[:3]
    wanted = {int(load) for load in loads.split(",") if load}
    cells = [
        cell
        for cell in sorted(flow.cells.all, key=lambda cell: flow.cells.order(cell.cell_id))
        if cell.layout == layout
        and workload in ("", cell.workload)
        and (not wanted or cell.concurrency in wanted)
    ]
    if not cells:
        sys.exit(f"no cell is '{selection}'")
    return cells


def record(flow: Workflow, cell: Cell) -> Path:
    return Path(flow.path(f"cells/{cell.cell_id}/record.json"))


def complete(flow: Workflow, config: dict[str, Any]) -> dict[str, Any]:
    """The largest part of an experiment of which every cell has been measured."""
    done = {
        (cell.layout, cell.workload, cell.concurrency)
        for cell in flow.cells.all
        if record(flow, cell).exists()
    }
    layouts, workloads = list(config["layouts"]), list(config["workloads"])
    best: tuple[int, int, list[str], list[str], list[int]] = (0, 0, [], [], [])
    for some in _subsets(layouts):
        for loads in _subsets(workloads):
            common = [
                c
                for c in config["matrix"]["concurrency"]
                if all((layout, workload, c) in done for layout in some for workload in loads)
            ]
            # Several layouts side by side are what the figures are for.
            size = (min(len(some), 2), len(some) * len(loads) * len(common))
            if common and size > best[:2]:
                best = (*size, some, loads, common)
    _, cells, some, loads, common = best
    if not cells:
        sys.exit("nothing has been measured yet")
    return config | {
        "layouts": {name: config["layouts"][name] for name in some},
        "workloads": {name: config["workloads"][name] for name in loads},
        "matrix": config["matrix"] | {"concurrency": common},
    }


def _subsets(names: list[str]) -> list[list[str]]:
    return [list(some) for size in range(1, len(names) + 1) for some in itertools.combinations(names, size)]


def main() -> None:
    path, what = Path(sys.argv[1]), sys.argv[2]
    config = read_yaml(path)
    flow = Workflow(config, [path])
    if what == "environment":
        print(flow.path(f"environment/probe-{flow.stack_key}.json"))
        print(flow.path(f"environment/check-{flow.stack_key}.json"))
        print(flow.path(f"models/{flow.model_key}.json"))
        for layout in flow.experiment.layouts:
            print(flow.path(f"plans/{layout}.json"))
    elif what == "model":
        print(flow.model_source)
    elif what == "cells":
        for cell in selected(flow, sys.argv[3]):
            print(record(flow, cell))
    elif what == "complete":
        Path(sys.argv[3]).write_text(
            yaml.safe_dump(complete(flow, config), sort_keys=False), encoding="utf-8"
        )
    else:
        sys.exit(f"'{what}' is none of environment, model, cells, complete")


if __name__ == "__main__":
    main()
