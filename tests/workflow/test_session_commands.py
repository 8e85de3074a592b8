# SPDX-License-Identifier: Apache-2.0
"""`up`, `status`, `down` and `logs` as a person uses them."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitbench.errors import UserError
from splitbench.serving import commands
from splitbench.serving.processes import ProcessId, marked
from splitbench.serving.session import Owner, acquire
from splitbench.serving.state import read_record, session_record
from tests.fakes.layouts import aggregated, disaggregated, free_ports, request


@pytest.fixture(autouse=True)
def here(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The commands find the state folder by themselves."""
    monkeypatch.setenv("SPLITBENCH_STATE", str(state))
    return


def said(*words: str) -> str:
    """Run a command; what it wrote."""
    parser = argparse.ArgumentParser()
    commands.add_commands(parser.add_subparsers(dest="command", required=True))
    written: list[str] = []
    assert commands.run(parser.parse_args(words), written.append) == 0
    return "".join(written)


def up(folder: Path, plan_text: str) -> str:
    """`up` with a plan file."""
    plan = folder / "plan.json"
    plan.write_text(plan_text)
    options = (
        "--serving-python",
        sys.executable,
        "--model",
        "stub-model",
        "--log-folder",
        str(folder / "logs"),
    )
    return said("up", str(plan), *options)


def test_a_layout_by_hand_from_up_to_down(state: Path, tmp_path: Path) -> None:
    assert said("status") == "nothing is up\n"
    assert said("down") == "nothing is up\n"
    plan = disaggregated(free_ports(5))
    text = up(tmp_path, plan.model_dump_json())
    assert f"up at http://127.0.0.1:{plan.front_port}, logs in {tmp_path}" in text
    text = said("status")
    assert "pd-" in text
    assert "ready" in text
    assert "started by hand" in text
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["prefill0", "decode0", "proxy"]
    assert json.loads(said("status", "--json"))["session"]["phase"] == "ready"
    assert "decode0 | (APIServer" in said("logs")
    assert said("logs", "decode0", "-n", "1").endswith("Application startup complete.\n")
    assert said("down").endswith("ended\n")
    assert marked(str(state)) == []
    assert "told to stop" in said("status")


def test_a_workflow_takes_the_node_from_a_session_by_hand(state: Path, tmp_path: Path) -> None:
    up(tmp_path, aggregated(free_ports(1)[0]).model_dump_json())
    told: list[str] = []
    wanted = request(aggregated(free_ports(1)[0], layout="sweep"), tmp_path, owner=Owner.current())
    with acquire(wanted, told.append, state=state) as session:
        assert not session.reused
    assert any(text.startswith("ending session agg-") for text in told)
    assert f"owner pid {Owner.current().pid}" in said("status")


def test_what_a_killed_supervisor_left_is_told_and_ended(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    up(tmp_path, aggregated(free_ports(1)[0], ignore_term="1").model_dump_json())
    record = read_record(session_record(state))
    assert record is not None
    supervisor = ProcessId.parse(record["supervisor"])
    supervisor.signal(signal.SIGKILL)
    while supervisor.alive():
        time.sleep(0.01)
    assert "still running of it: 1 of its processes; splitbench down ends them" in said("status")
    assert said("down") == "ended\n"
    assert "ending what a killed supervisor left behind (1 of its processes)" in capsys.readouterr().err
    assert said("status").startswith("nothing is up\n  last: agg-")


def test_logs_are_followed(tmp_path: Path, state: Path) -> None:
    up(tmp_path, aggregated(free_ports(1)[0]).model_dump_json())
    words = [sys.executable, "-u", "-m", "splitbench.serving.commands", "logs", "engine0", "-n", "1", "-f"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert "Application startup complete." in follower.stdout.readline()
        record = read_record(session_record(state))
        assert record is not None
        with Path(record["processes"][0]["log"]).open("a") as log:
            log.write("half ")
            log.flush()
            log.write("and half\n")
        assert follower.stdout.readline() == "half and half\n"
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 130


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no session was started on this node yet"):
        said("logs")
    with pytest.raises(UserError, match=r"none\.json: can't be read: No such file"):
        said("up", str(tmp_path / "none.json"), "--serving-python", "x", "--model", "m")
    with pytest.raises(UserError, match=r"plan\.json: budget: Field required"):
        up(tmp_path, '{"layout": "a", "kind": "aggregated"}')
    up(tmp_path, aggregated(free_ports(1)[0]).model_dump_json())
    with pytest.raises(UserError, match=r"'other' is none of its processes; choose from engine0, supervisor"):
        said("logs", "other")
