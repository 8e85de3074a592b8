# SPDX-License-Identifier: Apache-2.0
"""The fault campaign on real engines, SPLITBENCH_TEST_FAULTS trials of it (by default none: they take minutes)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.real.fault_campaign import campaign
from tests.workflow.flow import REPOSITORY

COUNT = int(os.environ.get("SPLITBENCH_TEST_FAULTS", "0"))

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300 * COUNT + 60),
    pytest.mark.skipif(COUNT == 0, reason="SPLITBENCH_TEST_FAULTS says how many"),
]


def test_faults_on_real_engines_leave_nothing_and_the_rerun_finishes() -> None:
    store = Path(os.environ.get("SPLITBENCH_STORE", REPOSITORY / ".splitbench")).resolve()
    said: list[str] = []
    trials = campaign(COUNT, seed=2026, store=store, say=said.append)
    assert [trial.wrong for trial in trials] == [[]] * COUNT, "\n".join(said)
    assert all(trial.hit is not None for trial in trials if trial.phase != "stopping"), "\n".join(said)
