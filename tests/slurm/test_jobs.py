# SPDX-License-Identifier: Apache-2.0
"""Every rule as a job of SLURM: the cells of a session as one, different sessions on different nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from splitbench.workflow import Workflow
from tests.slurm.cluster import Cluster
from tests.slurm.test_submit import Campaign, wait_for_empty_nodes
from tests.workflow.flow import REPOSITORY, default_config

pytest.importorskip("snakemake_executor_plugin_slurm")
pytestmark = pytest.mark.timeout(900)


def test_sessions_are_jobs_and_nodes_are_never_mixed_silently(
    cluster: Cluster, tmp_path: Path, stub: Path
) -> None:
    config = default_config(stub, 17100)
    del config["workloads"]["long"]
    config["layouts"]["agg"] = {"kind": "aggregated", "cores": [0, 1]}  # as many as PD: a pair to compare
    # What runs beside a test must not decide about its cells.
    limits = (
        "taken_warn",
        "taken_invalid",
        "client_late",
        "client_cpu",
        "coalesced_warn",
        "coalesced_invalid",
    )
    config["thresholds"] = {f"{name}_percent": 1e6 for name in limits} | {"load_percent": 1e-6}
    campaign = Campaign(cluster, tmp_path, config)
    workflow = [
        *(sys.executable, "-m", "snakemake", "--snakefile", str(REPOSITORY / "Snakefile")),
        *("--configfile", str(campaign.file)),
    ]
    here = ["--workflow-profile", str(REPOSITORY / "profiles" / "default"), "--cores", "2"]
    # The profile's pace is for real clusters.
    pace = ["--latency-wait", "10", "--seconds-between-status-checks", "1"]
    pace += ["--slurm-init-seconds-before-status-checks", "1"]
    jobs = ["--workflow-profile", str(REPOSITORY / "profiles" / "slurm-jobs"), *pace]
    # What comes before and after the cells needs no node of its own in a test: a job takes seconds to come and go.
    for command in (
        [*workflow, *here, "--until", "check", "--", "cells"],
        [*workflow, *jobs, "--", "cells"],
        [*workflow, *here, "--", "statistics"],
    ):
        done = cluster.head.run(
            command,
            folder=tmp_path,
            env={"SPLITBENCH_STORE": str(tmp_path / "store"), "PYTHONPATH": str(REPOSITORY)},
            check=False,
            limit_s=600,
        )
        told = done.stdout + done.stderr + cluster.told()
        assert done.returncode == 0, told
    assert wait_for_empty_nodes(cluster, 20) < 20
    records = campaign.records()
    planned = {cell.cell_id: cell.digest for cell in Workflow(config, sources=False).cells.all}
    assert {name: record["cell_digest"] for name, record in records.items()} == planned
    by_session: dict[str, set[tuple[str, str]]] = {}
    for name, record in records.items():
        node = record["node"]
        by_session.setdefault(name.partition("/")[0], set()).add((node["hostname"], node["slurm_job"]))
    # The cells of a session ran in one job; the two sessions at the same time, so each on its own node.
    assert all(len(jobs) == 1 for jobs in by_session.values()), by_session
    assert len({node for jobs in by_session.values() for node, _ in jobs}) == 2, told
    cells = pq.read_table(campaign.results / "tables" / "cells.parquet").to_pylist()
    assert len({row["node"] for row in cells}) == 2
    statistics = json.loads((campaign.results / "statistics.json").read_text())
    (verdict,) = statistics["verdicts"]
    assert verdict["outcome"] == "undecided"
    found = [json.loads(path.read_text()) for path in campaign.results.glob("parts/*/*/*/*/checks.json")]
    reasons = [each["reason"] for one in found for each in one["checks"] if each["verdict"] == "invalid"]
    assert reasons == []
    assert "other_nodes" in {reason["code"] for reason in verdict["reasons"]}
