# SPDX-License-Identifier: Apache-2.0
"""The command's manners: exit codes, quiet, no colours, completion."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from splitbench.cli import EXIT_CODES, build_parser, main
from splitbench.serving.commands import status_text
from splitbench.workflow import QUIET, REPOSITORY, say


def test_exit_codes_are_those_that_are_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    seen = {
        main(["config", "check", "config/config.yaml"]),
        main(["config", "check", str(tmp_path / "none")]),
    }
    with pytest.raises(SystemExit) as caught:
        main(["config"])
    seen.add(int(str(caught.value.code)))
    monkeypatch.setattr("splitbench.cli.explain", _raising(KeyboardInterrupt))
    seen.add(main(["config", "explain"]))
    monkeypatch.setattr("splitbench.cli.explain", _raising(BrokenPipeError))
    seen.add(main(["config", "explain"]))
    assert seen == set(EXIT_CODES)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"  {code:3d}  " in shown for code in EXIT_CODES)


def _raising(error: type[BaseException]) -> object:
    def fail(*_: object) -> str:
        raise error

    return fail


def test_quiet_leaves_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(QUIET, "")  # put back afterwards, since the command sets it for what it starts
    assert main(["-q", "config", "check", "nowhere.yaml"]) == 1
    assert "nowhere.yaml: no such file" in capsys.readouterr().err
    say("installing things")
    say("error: a thing is wrong")
    assert capsys.readouterr().err == "splitbench: error: a thing is wrong\n"


def test_status_is_json_for_programs_and_has_no_colour(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPLITBENCH_STATE", str(state))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert json.loads(status_text(as_json=True))["session"] is None
    assert status_text() == "nothing is up\n"
    assert main(["config", "explain", "slo"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_every_command_has_words_of_help() -> None:
    from splitbench.cli import _parsers

    for parser in _parsers(build_parser()):
        for action in parser._actions:
            if action.choices and isinstance(action.choices, dict):
                described = {each.dest for each in action._choices_actions}  # type: ignore[attr-defined]
                assert described == set(action.choices), parser.prog


def test_completion_is_a_script_that_bash_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for typed, offered in (
        ("config ex", ["explain"]),
        ("init --serv", ["--serving-python"]),
        ("sta", ["status"]),
    ):
        words = f"COMP_WORDS=(splitbench {typed}); COMP_CWORD={len(typed.split())}"
        asked = f"{script}\n{words}; _shtab_splitbench; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False)
        assert done.stdout.split() == offered, done.stderr
