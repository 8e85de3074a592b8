# SPDX-License-Identifier: Apache-2.0
"""The command's manners: exit codes, quiet, no colours, completion."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

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
    monkeypatch.setattr("splitbench.experiment.cli_config.explain", _raising(KeyboardInterrupt))
    seen.add(main(["config", "explain"]))
    monkeypatch.setattr("splitbench.experiment.cli_config.explain", _raising(BrokenPipeError))
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


def asked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """What a command prints, as JSON; nothing else may be on standard output, and nothing on standard error."""
    assert main([*words, "--json"]) == code
    shown = capsys.readouterr()
    assert shown.err == ""
    return json.loads(shown.out)


def test_json_is_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    found = asked(capsys, "config", "check", "config/config.yaml")
    assert (found["ok"], found["experiment"], found["cells"], found["problems"]) == (True, "demo", 16, [])
    wrong = tmp_path / "wrong.yaml"
    text = Path("config/config.yaml").read_text(encoding="utf-8")
    wrong.write_text(text.replace("seed: 7", "sead: 7").replace("[1, 2, 4, 8]", "[]"), encoding="utf-8")
    problems = asked(capsys, "config", "check", str(wrong), code=1)["problems"]
    line = text.splitlines().index("seed: 7") + 1
    assert {
        "where": f"{wrong}:{line}: sead",
        "message": "unknown key",
        "mend": "did you mean 'seed'?",
    } in problems
    assert len(problems) == 2
    assert (
        asked(capsys, "config", "check", str(tmp_path / "none"), code=1)["problems"][0]["message"]
        == "no such file"
    )
    (key,) = asked(capsys, "config", "explain", "slo.itl_ms")
    assert (key["key"], key["reruns"].partition(",")[0]) == ("slo.itl_ms", "the statistics")
    assert {each["key"] for each in asked(capsys, "config", "explain")} > {"slo", "layouts", "matrix"}
    monkeypatch.chdir(tmp_path)
    cost = asked(capsys, "estimate", "--configfile", str(REPOSITORY / "config/config.yaml"))
    assert (cost["cells"], cost["todo"], cost["starts"], cost["source"]) == (16, 16, 2, "nothing")


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
