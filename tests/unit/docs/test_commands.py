# SPDX-License-Identifier: Apache-2.0
"""No command in a page that wasn't run: cheap ones here, the others by the test that is named, all listed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest
import yaml

from splitbench.cli import main
from splitbench.experiment.explain import all_keys
from splitbench.measuring import conversations
from tests.unit.docs.pages import FENCE, REPOSITORY, commands, pages

# Sections whose names are those of other programs.
FREE = ("args", "env", "packages", "extra_args")
OURS = ".venv/bin/splitbench "
MADE = ".venv/bin/python -m splitbench.measuring.conversations "

# What starts engines, environments or snakemake: a pattern of whole commands, and the test that runs the like of it.
ELSEWHERE: tuple[tuple[str, str], ...] = (
    (r"make demo", "tests/real/test_end_to_end.py::test_every_cell_is_measured_and_sound"),
    (r"make (test|env)", ".ci/run::make test"),
    (
        r"\.venv/bin/snakemake --configfile \S+ plans",
        "tests/workflow/test_config.py::test_plans_need_neither_engines",
    ),
    (
        r"\.venv/bin/snakemake( --configfile \S+)? -n",
        "tests/workflow/test_rerun.py::test_a_layouts_field_runs_its",
    ),
    (
        r"\.venv/bin/snakemake --configfile \S+",
        "tests/workflow/test_rerun.py::test_everything_is_there_so_nothing",
    ),
    (
        r"\.venv/bin/splitbench submit .*",
        "tests/slurm/test_submit.py::test_a_sweep_that_is_ended_in_every_way",
    ),
    (
        r"\.venv/bin/snakemake --workflow-profile profiles/slurm-jobs --configfile \S+",
        "tests/slurm/test_jobs.py::test_sessions_are_jobs_and_nodes",
    ),
    (
        r"\.venv/bin/splitbench up \S+",
        "tests/workflow/test_session_commands.py::test_a_layout_by_hand_from_up_to_down",
    ),
    (
        r"\.venv/bin/splitbench logs( -n 20)?",
        "tests/workflow/test_session_commands.py::test_a_layout_by_hand_from_up",
    ),
    (
        r"python -m splitbench\.proxy .*",
        "tests/unit/proxy/test_proxy_options.py::test_the_reference_experiments_comm",
    ),
)


def all_commands() -> list[str]:
    """Every command of every page, once, in the order in which a reader meets them."""
    listed = sorted(pages(), key=lambda path: (path.name != "README.md", path.name != "howto.md", path))
    return list(dict.fromkeys(command for page in listed for command in commands(page)))


def elsewhere(command: str) -> str | None:
    """The test that runs the like of a command."""
    return next((test for pattern, test in ELSEWHERE if re.fullmatch(pattern, command)), None)


def test_commands_that_others_run_are_run_by_them() -> None:
    for pattern, test in ELSEWHERE:
        assert any(re.fullmatch(pattern, command) for command in all_commands()), (
            f"no page has {pattern} any more"
        )
        file, _, name = test.partition("::")
        assert name in (REPOSITORY / file).read_text(encoding="utf-8"), test


def test_every_other_command_works_as_it_stands(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the pages, in a folder that looks like a checkout; `splitbench` alone, since the rest is slow."""
    shutil.copytree(REPOSITORY / "config", tmp_path / "config")
    shutil.copytree(REPOSITORY / "envs", tmp_path / "envs")
    theirs = REPOSITORY / "tests" / "unit" / "tables" / "results.py"
    made: dict[str, object] = {}
    exec(compile(theirs.read_text(encoding="utf-8"), str(theirs), "exec"), made)
    detailed = made["detailed"]
    assert callable(detailed)
    (tmp_path / "theirs.json").write_text(json.dumps(detailed()), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPLITBENCH_STATE", str(state))
    run = 0
    for command in all_commands():
        if elsewhere(command) is not None:
            continue
        if command.startswith(MADE):
            assert conversations.main(shlex.split(command.removeprefix(MADE))) == 0
            continue
        assert command.startswith(OURS), f"list the test that runs it: {command}"
        words = shlex.split(command.removeprefix(OURS).partition(" > ")[0])
        code = main(words)
        shown = capsys.readouterr()
        # Whether this machine fits an experiment depends on the machine; that it was looked at does not.
        wanted = (0, 2) if words[:2] == ["environment", "check"] else (0,)
        assert code in wanted, f"{command}\n{shown.err}"
        assert code == 0 or "does not fit: " in shown.out
        run += 1
    assert run >= 12


def test_every_fence_says_its_language() -> None:
    for page in [
        *(REPOSITORY / "docs").glob("*.md"),
        *REPOSITORY.glob("*.md"),
        REPOSITORY / "config/README.md",
    ]:
        for block in FENCE.finditer(page.read_text(encoding="utf-8")):
            assert block["language"] in ("bash", "yaml", "json", "console", "python", "text"), (
                f"{page}: {block[0][:80]}"
            )


def test_every_key_in_a_yaml_block_is_a_key() -> None:
    known = {re.sub(r"\[\]", "", key.path) for key in all_keys()}
    blocks = 0
    for page in pages():
        for block in FENCE.finditer(page.read_text(encoding="utf-8")):
            if block["language"] == "yaml":
                value = yaml.safe_load(textwrap.dedent(block["body"]))
                if "expects" in value:
                    continue  # a stack file
                # A block may show layouts alone.
                top = (
                    value if set(value) & {path for path in known if "." not in path} else {"layouts": value}
                )
                assert unknown(top, "", known) == [], page
                blocks += 1
    assert blocks >= 6


def unknown(value: object, place: str, known: set[str]) -> list[str]:
    """Keys of a value that no experiment has."""
    if isinstance(value, list):
        return [each for item in value for each in unknown(item, place, known)]
    if not isinstance(value, dict):
        return []
    found = []
    for name, inside in value.items():
        here = next(
            (path for path in (f"{place}.{name}".lstrip("."), f"{place}.NAME") if _below(path, known)), None
        )
        if here is None:
            found += (
                []
                if place.rpartition(".")[2] in ("args", "env", "packages", "extra_args")
                else [f"{place}.{name}"]
            )
        else:
            found += unknown(inside, here, known)
    return found


def _below(path: str, known: set[str]) -> bool:
    return path in known or any(each.startswith(f"{path}.") for each in known)
