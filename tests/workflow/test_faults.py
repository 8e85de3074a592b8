# SPDX-License-Identifier: Apache-2.0
"""A few trials of the fault campaign; all 200 are run by hand (`python -m tests.workflow.fault_campaign`)."""

from __future__ import annotations

from tests.workflow.fault_campaign import campaign


def test_faults_leave_nothing_behind_and_no_false_result() -> None:
    said: list[str] = []
    trials = campaign(10, seed=2026, say=said.append)
    assert [trial.wrong for trial in trials] == [[]] * 10, "\n".join(said)
    assert sum(fault.hit is not None for trial in trials for fault in trial.faults) >= 6
