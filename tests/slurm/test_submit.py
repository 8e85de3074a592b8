# SPDX-License-Identifier: Apache-2.0
"""The whole workflow in one allocation of a real SLURM: ended by it in every way, and continued where it stopped."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitbench.workflow import Workflow
from tests.slurm.cluster import NODES, Cluster
from tests.workflow.flow import REPOSITORY, default_config

pytestmark = pytest.mark.timeout(900)


class Campaign:
    """An experiment in a folder that all nodes see, submitted from the head."""

    def __init__(
        self, cluster: Cluster, folder: Path, config: dict[str, Any], name: str = "experiment.yaml"
    ) -> None:
        self.cluster, self.folder, self.config = cluster, folder, config
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / name
        self.file.write_text(yaml.safe_dump(config), encoding="utf-8")
        self.results = folder / "results" / str(config["experiment"])

    def submit(self, *arguments: str) -> int:
        """Submit it; the job's number."""
        done = self.cluster.head.run(
            [sys.executable, "-m", "splitbench.cli", "submit", "--configfile", str(self.file), *arguments],
            folder=self.folder,
            env={"SPLITBENCH_STORE": str(self.folder / "store"), "PYTHONPATH": str(REPOSITORY)},
        )
        return int(done.stdout.split()[1].rstrip(":"))

    def records(self) -> dict[str, dict[str, Any]]:
        """Records of all cells that were measured, by their folder."""
        return {
            str(path.parent.relative_to(self.results / "cells")): json.loads(path.read_text())
            for path in self.results.glob("cells/*/*/*/*/record.json")
        }

    def wait_for_cells(self, count: int) -> None:
        """Wait until so many cells are measured."""
        known = set(self.cluster.jobs())

        def enough() -> bool:
            states = self.cluster.jobs()
            lost = {states[job] for job in known if job in states} <= {"FAILED", "CANCELLED"}
            assert not lost, self.cluster.told() + self.log()
            return len(self.records()) >= count

        self.cluster.until(f"{count} cells", enough, 120)

    def log(self) -> str:
        """What all jobs wrote."""
        return "\n".join(path.read_text() for path in sorted(self.results.glob("logs/slurm/*.log")))


def wait_for_empty_nodes(cluster: Cluster, limit_s: float) -> float:
    """Wait until nothing but SLURM's daemons is left on any node; seconds that took."""
    begun = time.monotonic()

    def busy() -> dict[str, dict[int, str]]:
        return {name: work for name in NODES if (work := cluster.nodes[name].work())}

    while left := busy():
        assert time.monotonic() - begun < limit_s, f"left on nodes: {left}"
        time.sleep(0.1)
    return time.monotonic() - begun


@pytest.mark.skipif(
    not os.environ.get("SPLITBENCH_TEST_SLURM"),
    reason="SPLITBENCH_TEST_SLURM=1 runs it: three minutes of interrupted sweeps with limits in seconds",
)
def test_a_sweep_that_is_ended_in_every_way_and_goes_on(cluster: Cluster, tmp_path: Path, stub: Path) -> None:
    """Time limit, lost node daemon, scancel: each time only unfinished cells run, and nothing is left on a node."""
    config = default_config(stub, 17100) | {"matrix": {"concurrency": [1, 2, 3, 4], "restarts": 2}}
    del config["workloads"]["long"]
    config["engine"]["env"]["VLLM_STUB_STEP_MS"] = "60"  # a sweep that outlasts SLURM's loss of a node
    folder = tmp_path / "it's $(touch here); a folder"
    campaign = Campaign(cluster, folder, config, 'the "config" $HOME.yaml')
    planned = {cell.cell_id: cell.digest for cell in Workflow(config, sources=False).cells.all}
    job = campaign.submit("--time", "30", "--option", "comment=a 'b' $(c) \\d", "--", "cells")
    assert "Comment=a 'b' $(c) \\d \n" in cluster.head.run(["scontrol", "show", "job", str(job)]).stdout

    # The time limit is near: SLURM tells the job, which finishes its cell, and starts again by itself.
    campaign.wait_for_cells(1)
    cluster.head.run(["scancel", "--batch", "--signal=USR1", str(job)])
    cluster.until("the job to be requeued", lambda: "requeued, to go on" in campaign.log(), 60)
    assert wait_for_empty_nodes(cluster, 10) < 10
    records = [campaign.records()]
    assert 1 <= len(records[0]) <= 2

    # The daemon of its node is killed: SLURM gives the node up and starts the job on the other one.
    campaign.wait_for_cells(len(records[0]) + 1)
    (node,) = [name for name in NODES if cluster.nodes[name].work()]
    (other,) = set(NODES) - {node}
    cluster.kill_slurmd(node)
    cluster.until("the other node to work", lambda: cluster.nodes[other].work(), 60)
    cluster.until("the lost node to end", lambda: not cluster.nodes[node].work(), 25)
    cluster.start_slurmd(node)
    records.append(campaign.records())

    # Ended by hand.
    campaign.wait_for_cells(len(records[1]) + 1)
    cluster.head.run(["scancel", str(job)])
    assert wait_for_empty_nodes(cluster, 30) < 30
    records.append(campaign.records())
    assert len(records[2]) < len(planned)
    cluster.wait_for_job(job, "CANCELLED")

    again = campaign.submit("--time", "30", "--", "cells")
    assert cluster.wait_for_job(again) == "COMPLETED", campaign.log()
    assert wait_for_empty_nodes(cluster, 5) < 5
    records.append(campaign.records())
    for earlier, later in itertools.pairwise(records):
        again = [name for name, record in earlier.items() if later.get(name) != record]
        # What was measured stays as it was, but for the cell that was just being finished: a node that SLURM has given
        # up may finish it while the other one measures it too, and snakemake may end before it notes what it has.
        assert len(again) <= 1, again
    assert {name: record["cell_digest"] for name, record in records[-1].items()} == planned
    assert not list(tmp_path.rglob("here"))
