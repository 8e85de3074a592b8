# SPDX-License-Identifier: Apache-2.0
"""No command in a page that wasn't run: cheap ones here, the others by the test that is named, all listed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import textwrap
from pathlib import Path
from typing import get_args

import pytest
import yaml

from splitbench.cli import _parsers, build_parser, main
from splitbench.experiment import load, models
from splitbench.experiment.explain import all_keys
from splitbench.experiment.load import read_yaml
from splitbench.figures import measured, style
from splitbench.measuring import conversations
from splitbench.measuring.estimate import estimate
from splitbench.measuring.progress import clock
from splitbench.report import words
from splitbench.serving import plan
from splitbench.statistics.quantiles import needed
from splitbench.workflow import Workflow
from tests.unit.docs.pages import FENCE, REPOSITORY, commands, pages

# Sections whose names are those of other programs.
FREE = ("args", "env", "packages", "extra_args")
OURS = ".venv/bin/splitbench "
MADE = ".venv/bin/python -m splitbench.measuring.conversations "

# What starts engines, environments or snakemake: a pattern of whole commands, and the test that runs the like of it.
ELSEWHERE: tuple[tuple[str, str], ...] = (
    (r"make demo", "tests/real/test_end_to_end.py::test_every_cell_is_measured_and_sound"),
    (r"make (test|env|pages)", ".ci/run::make test"),
    (
        r"make bundle STACK=\S+ OUT=\S+",
        "tests/unit/environment/test_bundle.py::test_it_comes_out_as_an_environment_of_its_own",
    ),
    (
        r"python3 carry-1/bootstrap\.py .*",
        "tests/unit/environment/test_bundle.py::test_it_comes_out_as_an_environment_of_its_own",
    ),
    (
        r"\.venv/bin/snakemake archive( --configfile \S+)?",
        "tests/workflow/test_archive.py::test_the_archive_of_a_run_holds",
    ),
    (
        r"\.venv/bin/splitbench verify \S+",
        "tests/unit/archive/test_archive.py::test_it_verifies",
    ),
    (
        r"\.venv/bin/splitbench (trace|compare) .*",
        "tests/unit/archive/test_trace_compare.py::test_in_words",
    ),
    (
        r"\.venv/bin/splitbench restore \S+ \S+",
        "tests/workflow/test_archive.py::test_a_restored_archive_has_nothing_to_do",
    ),
    (
        r"\.venv/bin/snakemake first --configfile \S+",
        "tests/workflow/test_config.py::test_an_experiment_of_its_own_does_not_inherit",
    ),
    (
        r"\.venv/bin/snakemake plans --configfile \S+",
        "tests/workflow/test_config.py::test_plans_need_neither_engines",
    ),
    (
        r"\.venv/bin/snakemake( --configfile \S+)? -n",
        "tests/workflow/test_rerun.py::test_a_layouts_field_runs_its",
    ),
    (
        r"\.venv/bin/snakemake( --configfile \S+)?",
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
        r"\.venv/bin/splitbench up \S+( --configfile \S+)?",
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


def test_no_command_hides_from_this_test_in_an_indented_block() -> None:
    for page in pages():
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        found = re.findall(
            r"^(?: {4}|\t)(?:\S*splitbench|\S*snakemake|make|\S*python3?) .*", text, re.MULTILINE
        )
        assert found == [] or "benchmarks" in page.parts, page


def test_the_operators_page_says_what_the_experiment_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = REPOSITORY / "config" / "experiments" / "sakura-h100.yaml"
    flow = Workflow(read_yaml(config), [config])
    found = estimate(flow)
    assert found.seconds is not None
    text = (REPOSITORY / "docs" / "sakura-h100.md").read_text(encoding="utf-8")
    assert f"**{found.cells} cells, {found.starts} starts of a layout, about {clock(found.seconds)}**" in text
    assert f"each of the {len(flow.experiment.claims)} claims" in text
    assert f"{flow.experiment.engine.startup_limit_s:,.0f} s to start" in text
    largest = max(cell.prompts for cell in flow.cells.all)
    assert f"n={largest}, needs {needed(0.99)}" in text
    budgets = [plan.budget.count for plan in flow.cells.plans.values()]
    assert budgets.count(flow.cells.plans["2p1d"].budget.count) == 1


def test_every_place_of_a_layouts_kind_knows_every_kind() -> None:
    """Those that docs/layout-kind.md lists; whoever adds a kind and forgets one finds it here."""
    kinds = set(get_args(plan.Kind))
    sections = get_args(get_args(models.Layout)[0])
    places: dict[str, set[str]] = {
        "experiment/models.py": {get_args(each.model_fields["kind"].annotation)[0] for each in sections},
        "experiment/load.py": set(load._KINDS),
        "figures/style.py": set(style._DASHES),
        "figures/measured.py": set(measured.KINDS) & set(measured.KIND_WORDS),
        "report/words.py": {name[5:] for name in words._EN if name.startswith("kind_")},
        "tables/cli_import.py": set(_choices("import", "--kind")),
    }
    assert {place: found for place, found in places.items() if found != kinds} == {}
    assert {name[5:] for name in words._JA if name.startswith("kind_")} == kinds
    text = (REPOSITORY / "docs" / "layout-kind.md").read_text(encoding="utf-8")
    assert [place for place in places if f"`splitbench/{place}`" not in text] == []


def _choices(command: str, option: str) -> tuple[str, ...]:
    parser = next(each for each in _parsers(build_parser()) if each.prog.endswith(f" {command}"))
    found = next(action for action in parser._actions if option in action.option_strings)
    return tuple(found.choices or ())


def test_snakemake_reads_its_commands_as_they_are_meant() -> None:
    """`--configfile` takes all words that follow it, a target too: it must come last."""
    from snakemake.cli import get_argument_parser

    parser = get_argument_parser()
    heads = [
        path.read_text(encoding="utf-8") for path in (REPOSITORY / "config" / "experiments").glob("*.yaml")
    ]
    written = [command for command in all_commands() if command.startswith(".venv/bin/snakemake")]
    written += re.findall(r"# Run: (snakemake.*)", "\n".join(heads))
    written += re.findall(
        r"`(snakemake [^`]+)`", "".join(page.read_text(encoding="utf-8") for page in pages())
    )
    assert len(written) > 20
    targets = set()
    for command in written:
        read = parser.parse_args(shlex.split(command)[1:])
        assert len(read.configfile or []) <= 1, command
        targets |= set(read.targets)
    rules = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "rules").glob("*.smk"))
    # A figure is asked for by its name, which is a file of a rule per figure.
    assert [t for t in targets if f"rule {t}:" not in rules and not t.startswith("figures/")] == []
    assert {"plans", "first", "archive"} <= targets


# Of vLLM, git, hub clients, SLURM and container engines; everything else that a page names must be ours or snakemake's.
FOREIGN = {
    *("--ignore-eos", "--api-key", "--no-async-scheduling", "--enforce-eager", "--max-model-len"),
    *("--nodelist", "--exclude", "--shm-size", "--ulimit", "--strict", "--save-detailed"),
}


def test_every_option_and_variable_that_a_page_names_exists() -> None:
    from snakemake.cli import get_argument_parser

    known = {
        option
        for parser in _parsers(build_parser())
        for each in parser._actions
        for option in each.option_strings
    }
    known |= {option for each in get_argument_parser()._actions for option in each.option_strings}
    source = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "splitbench").rglob("*.py"))
    campaigns = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("*.py"))
    for page in pages():
        if "benchmarks" in page.parts:
            continue
        text = page.read_text(encoding="utf-8")
        if page.name == "CONTRIBUTING.md":
            known |= set(re.findall(r'"(--[a-z-]+)"', campaigns))
        for option in re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text):
            assert option in known | FOREIGN or f'"{option}"' in source, f"{page}: {option}"
        for variable in re.findall(r"SPLITBENCH_[A-Z_]+", text):
            assert variable in source, f"{page}: {variable}"
    public = set(re.findall(r'"(SPLITBENCH_[A-Z]+)"', source)) - INTERNAL
    shown = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [variable for variable in sorted(public) if f"`{variable}`" not in shown] == []


# Set by the workflow for its own processes, or read by its tests.
INTERNAL = {"SPLITBENCH_OWNER", "SPLITBENCH_SESSION"}


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
