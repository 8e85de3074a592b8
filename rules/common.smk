# SPDX-License-Identifier: Apache-2.0
# What all rules share: the experiment, and look-ups from wildcards. No disk and no subprocess at parse time.

import os
import sys
from pathlib import Path

sys.path.insert(0, workflow.basedir)

from splitbench.errors import UserError
from splitbench.cluster.node import own
from splitbench.measuring.stage import last_word, outlook, set_aside_if_invalid
from splitbench.serving.session import Owner, stop
from splitbench.workflow import CELL_PATTERN, Workflow, cell_id, say

try:
    flow = Workflow(
        config, [Path(name) for name in workflow.configfiles], Path(workflow.basedir)
    )
except UserError as error:
    for line in str(error).splitlines():
        say(f"error: {line}")
    sys.exit(1)

# Sessions live as long as the snakemake that a person started, or on another node as the job of SLURM; what it starts
# inherits this.
os.environ |= own(os.environ)


# One wildcard per part of a cell's id.
CELL = "{layout}/{load}/{restart}-{repeat}"


wildcard_constraints:
    cell=CELL_PATTERN,
    layout=r"[^/]+",
    workload=r"[^/]+",
    load=r"[^/]+/c\d+",
    restart=r"\d+",
    repeat=r"\d+",


def cell_slice(wildcards):
    return flow.cell_slice(cell_id(wildcards))


def invalid_ones_again(wildcards):
    # Input functions run when jobs are planned: a cell that lost its record by then is measured again. A dry run only
    # says so.
    if flow.experiment.on_invalid == "rerun" and workflow.is_main_process:
        planned_only = workflow.dryrun or workflow.touch
        if workflow.executor_plugin is not None and not planned_only:
            if set_aside_if_invalid(flow, cell_id(wildcards)):
                say(f"{cell_id(wildcards)} is invalid and measured again")
    return []


def cell_priority(wildcards):
    return flow.cell_priority(cell_id(wildcards))


def all_cells(pattern):
    return [flow.path(pattern).format(cell=cell) for cell in flow.cells.ids]


def cell_files():
    names = (
        "cell.json",
        "bench.json",
        "metrics.json",
        "engine_facts.json",
        "telemetry.json",
        "logs.json.gz",
        "record.json",
    )
    return [path for name in names for path in all_cells(f"cells/{{cell}}/{name}")]


def first_cell_files():
    return [
        flow.path(f"{folder}/{cell}/{name}.json")
        for cell in flow.first_cells
        for folder, name in (("cells", "record"), ("parts", "checks"))
    ]


def floor_files(wildcards):
    return [flow.floor_path] if flow.experiment.node.selftest_streams else []


def plan_of(wildcards):
    return flow.plan_text(wildcards.layout)


def plan_script_of(wildcards):
    return flow.plan_script(wildcards.layout)


def plan_files():
    names = flow.experiment.layouts
    return [
        flow.path(f"plans/{name}.{end}") for name in names for end in ("json", "sh")
    ]


def figure_slice(wildcards):
    return flow.figure_text(wildcards.figure)


def figure_workload(wildcards):
    return wildcards.figure.partition("-")[2]


def figure_files():
    return [flow.path(f"figures/{name}.png") for name in flow.figure_names]


onstart:
    if (line := outlook(flow)) is not None:
        say(line)


onsuccess:
    stop(owner=Owner.from_env(os.environ), progress=say)
    if (line := last_word(flow)) is not None:
        say(line)


onerror:
    stop(owner=Owner.from_env(os.environ), progress=say)
