# SPDX-License-Identifier: Apache-2.0
"""The sbatch script, and who owns sessions in a job, without SLURM."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from splitbench.cluster.node import PLACE_VARIABLE, node_now, own
from splitbench.cluster.script import Allocation, directive, render_script
from splitbench.errors import UserError
from splitbench.serving.state import OWNER_VARIABLE, Owner

NASTY = ["a b", "it's", '"', "$(touch x)", "`x`", "a;b", "#no comment", "back\\slash", "*", "-n", "ä"]


def allocation(**options):
    return Allocation("name", Path("/some where"), "logs/%j.log", gpus=4, options=options)


def lines_of(script):
    return [line for line in script.splitlines() if line.startswith("#SBATCH")]


def test_a_shell_reads_every_argument_as_it_was_given():
    *_, last = render_script(allocation(), ["python", *NASTY]).splitlines()
    assert shlex.split(last) == ["exec", "python", *NASTY]


def test_an_allocation_asks_for_what_a_session_needs():
    script = render_script(allocation(), ["true"])
    assert script.startswith("#!/bin/sh\n")
    for wanted in (
        "--exclusive",
        "--gres=gpu:4",
        "--requeue",
        "--signal=B:USR1@600",
        "--open-mode=append",
        "--chdir='/some where'",
        "--dependency=singleton",
    ):
        assert f"#SBATCH {wanted}" in lines_of(script)


def test_options_win_over_defaults_and_can_leave_them_out():
    lines = lines_of(
        render_script(allocation(gres="gpu:h100:8", exclusive=False, requeue=None, time=90), ["true"])
    )
    assert {"#SBATCH --gres=gpu:h100:8", "#SBATCH --time=90"} <= set(lines)
    assert not any("exclusive" in line or "requeue" in line or "gpu:4" in line for line in lines)


def test_gpus_that_are_asked_for_otherwise_are_not_asked_for_twice():
    lines = lines_of(render_script(allocation(**{"gpus-per-node": "h100:8"}), ["true"]))
    assert not any("--gres" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "value"),
    [("signal", "B:KILL@1"), ("--partition", "x"), ("comment", "two\nlines"), ("comment", "bell\a")],
)
def test_what_cannot_be_an_option_is_refused(name, value):
    with pytest.raises(UserError):
        render_script(allocation(**{name: value}), ["true"])


@pytest.mark.parametrize("folder", ["/a%j", "/a\\b"])
def test_a_folder_that_slurm_would_read_otherwise_is_refused(folder):
    with pytest.raises(UserError, match="without them"):
        render_script(Allocation("name", Path(folder), "logs/%j.log", gpus=0), ["true"])


def test_an_argument_with_a_line_break_is_refused():
    with pytest.raises(UserError, match="rename"):
        render_script(allocation(), ["a\nb"])


def test_sbatch_takes_a_backslash_for_an_escape_even_in_quotes():
    assert directive("comment", "a\\b") == "#SBATCH --comment='a\\\\b'"
    assert directive("exclusive", True) == "#SBATCH --exclusive"
    assert directive("exclusive", False) is None


def test_a_process_owns_sessions_unless_one_of_the_same_job_on_this_node_does():
    me = str(Owner.current())
    here = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7"}
    first = own(here)
    assert first[OWNER_VARIABLE] == me
    parent = {OWNER_VARIABLE: "17:4", PLACE_VARIABLE: first[PLACE_VARIABLE]}
    assert own(here | parent)[OWNER_VARIABLE] == "17:4"
    for elsewhere in ({"SLURMD_NODENAME": "n2"}, {"SLURM_JOB_ID": "8"}):
        assert own(here | parent | elsewhere)[OWNER_VARIABLE] == me
    assert own({OWNER_VARIABLE: "17:4"})[OWNER_VARIABLE] == "17:4"  # set by hand


def test_a_nodes_label_is_steady_and_does_not_name_it():
    one, again, other = (node_now({"SLURMD_NODENAME": name}) for name in ("gpu07", "gpu07", "gpu08"))
    assert one == again and one["label"] != other["label"]
    assert one["hostname"] == "gpu07" and "gpu07" not in str(one["label"])
    assert node_now({})["hostname"] == os.uname().nodename.partition(".")[0]
