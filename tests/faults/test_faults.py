# SPDX-License-Identifier: Apache-2.0
"""The page of the fault campaign is whole; and SPLITBENCH_TEST_FAULTS of its faults (default none: a minute each)."""

from __future__ import annotations

import os
import random

import pytest

from tests.faults.campaign import END, FAULTS, START, campaign
from tests.faults.ground import Trial, errors, told
from tests.workflow.flow import REPOSITORY

COUNT = int(os.environ.get("SPLITBENCH_TEST_FAULTS", "0"))


def test_the_page_shows_faults_that_the_campaign_knows_and_none_that_came_out_wrong() -> None:
    text = (REPOSITORY / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = [line for line in text.partition(START)[2].partition(END)[0].splitlines() if line.startswith("| ")]
    shown = [row.split(" | ")[0].removeprefix("| ") for row in rows[1:]]
    assert shown
    assert shown == [name for name in FAULTS if name in shown]
    assert all(row.split(" | ")[2] == "none" for row in rows[1:])


def test_what_a_user_sees_is_our_lines_without_places_of_a_machine() -> None:
    output = (
        "Job 1 failed\nsplitbench: error: /tmp/x/results/a/b.json: can't be written; make room\n"
        "splitbench: starting session pd\nsplitbench: waiting for another (pid 77)\n"
    )
    assert errors(output) == ["error: …/b.json: can't be written; make room", "waiting for another (pid N)"]


def test_a_traceback_of_ours_is_a_fault_and_one_of_snakemake_is_told() -> None:
    ours, theirs = Trial("x", "1"), Trial("x", "1")
    told(ours, 'Traceback (most recent call last):\n  File "/a/splitbench/files.py", line 1\nOSError: x\n')
    told(theirs, 'Traceback (most recent call last):\n  File "/a/snakemake/io.py", line 1\nOSError: x\n')
    assert len(ours.wrong) == 1
    assert theirs.wrong == []


@pytest.mark.timeout(200 * COUNT + 60)
@pytest.mark.skipif(COUNT == 0, reason="SPLITBENCH_TEST_FAULTS says how many")
def test_some_faults() -> None:
    said: list[str] = []
    names = random.Random("2026").sample(list(FAULTS), COUNT)
    trials = campaign(names, 2026, said.append, FAULTS)
    assert [trial.wrong for trial in trials] == [[]] * COUNT, "\n".join(said)
