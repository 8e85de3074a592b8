# SPDX-License-Identifier: Apache-2.0
"""A layout over two nodes: prefill here, decode on the other one, started and ended as a step of SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import NODES, Cluster
from tests.slurm.test_submit import Campaign, wait_for_empty_nodes
from tests.workflow.flow import default_config

pytestmark = pytest.mark.timeout(900)


def test_decode_on_another_node_is_measured_and_leaves_nothing(
    cluster: Cluster, tmp_path: Path, stub: Path
) -> None:
    config = default_config(stub, 17100) | {"matrix": {"concurrency": [1, 2]}}
    del config["workloads"]["long"], config["layouts"]["agg"]
    config["layouts"]["pd"]["decode"] |= {"node": 1}
    campaign = Campaign(cluster, tmp_path, config)
    job = campaign.submit("--time", "30", "--", "cells")

    def engines() -> list[str]:
        """Roles of the engines that run, node by node."""
        shown = [" ".join(cluster.nodes[name].work().values()) for name in NODES]
        return ["producer" * ("kv_producer" in text) + "consumer" * ("kv_consumer" in text) for text in shown]

    cluster.until("an engine on each node", lambda: "consumer" in engines()[1], 90)
    assert cluster.wait_for_job(job) == "COMPLETED", campaign.log()
    assert wait_for_empty_nodes(cluster, 5) < 5
    assert len(campaign.records()) == 2

    # Ended in mid-measurement: the step on the other node goes, too.
    again = Campaign(cluster, tmp_path, config | {"seed": 2})
    job = again.submit("--time", "30", "--", "cells")
    cluster.until("an engine on each node", lambda: "consumer" in engines()[1], 90)
    cluster.head.run(["scancel", str(job)])
    assert wait_for_empty_nodes(cluster, 30) < 30
