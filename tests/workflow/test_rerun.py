# SPDX-License-Identifier: Apache-2.0
"""The rerun table of the architecture: what runs again after which edit, by the planned numbers of jobs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from splitbench.tables.dataset import open_table
from tests.workflow.flow import REPOSITORY, Flow

FIGURES = 6  # three kinds for two workloads
AFTER_CELLS = {"tables": 1, "statistics": 1, "figure": FIGURES, "report": 1}


def copied(finished: Flow, tmp_path: Path, *lost: str) -> Flow:
    """A copy of the finished folder elsewhere, without some of its entries."""
    copy = Flow(tmp_path / "copy", Path(finished.config["stack"]["python"]), config=finished.config)
    shutil.copytree(
        finished.folder, copy.folder, ignore=shutil.ignore_patterns("state", *lost), dirs_exist_ok=True
    )
    return copy


def test_everything_is_there_so_nothing_runs(finished: Flow) -> None:
    assert finished.planned() == {}
    assert set(finished.status().values()) == {"completed"}
    assert len(finished.status()) == 8


def test_shell_text_in_values_stays_text(finished: Flow) -> None:
    assert list(finished.folder.rglob("injected")) == []
    assert not (REPOSITORY / "injected").exists()
    page = (finished.results / "report.html").read_text(encoding="utf-8")
    assert "$(touch" in page
    plan = yaml.safe_load((finished.results / "plans" / "agg.json").read_text(encoding="utf-8"))
    assert plan["engines"][0]["env"]["NOTE"] == finished.config["title"]


def test_engine_facts_lie_beside_every_cell_and_in_the_tables(finished: Flow) -> None:
    cells = sorted(finished.results.glob("cells/*/*/*/*/engine_facts.json"))
    parts = sorted(finished.results.glob("parts/*/*/*/*"))
    assert len(cells) == len(parts) == 8
    rows = open_table(parts, "engine_facts").to_table().to_pandas()
    pools = rows[rows["fact"] == "kv_cache_tokens"]
    assert sorted(pools["engine"]) == ["decode-0"] * 4 + ["engine-0"] * 4 + ["prefill-0"] * 4
    assert set(pools["number"]) == {65536.0}


def test_key_order_and_comments_run_nothing(finished: Flow) -> None:
    def reversed_keys(value: object) -> object:
        if isinstance(value, dict):
            return {key: reversed_keys(item) for key, item in reversed(value.items())}
        return value

    text = yaml.safe_dump(reversed_keys(finished.config), sort_keys=False)
    text = "# a comment\n" + text.replace("\n", "   # another\n", 1)
    assert finished.planned(text=text) == {}


def test_a_layouts_field_runs_its_cells(finished: Flow) -> None:
    config = finished.edited("layouts/agg/args", {"max-num-seqs": 16})
    assert finished.planned(config=config) == {"plan": 1, "cell": 4, "part": 4, **AFTER_CELLS}


def test_a_workloads_field_runs_its_cells(finished: Flow) -> None:
    config = finished.edited("workloads/long/output_tokens", 9)
    assert finished.planned(config=config) == {"cell": 4, "part": 4, **AFTER_CELLS}


def test_another_concurrency_runs_its_cells(finished: Flow) -> None:
    config = finished.edited("matrix/concurrency", [1, 4])
    assert finished.planned(config=config) == {"cell": 4, "part": 4, **AFTER_CELLS}


def test_one_more_concurrency_runs_only_that(finished: Flow) -> None:
    config = finished.edited("matrix/concurrency", [1, 2, 4])
    assert finished.planned(config=config) == {"cell": 4, "part": 4, **AFTER_CELLS}


def test_one_concurrency_less_runs_no_cell(finished: Flow) -> None:
    config = finished.edited("matrix/concurrency", [1])
    assert finished.planned(config=config) == AFTER_CELLS


def test_a_figures_style_runs_that_figure_and_the_report(finished: Flow) -> None:
    settings = {"itl_by_concurrency": {"width": "page"}, "itl_of_layouts": {}, "ttft_of_layouts": {}}
    assert finished.planned(config=finished.edited("figures", settings)) == {"figure": 2, "report": 1}


def test_one_figure_is_drawn_by_its_short_name(finished: Flow) -> None:
    assert finished.planned("figures/itl_by_concurrency-long") == {}
    edited = finished.edited("figures", {"itl_by_concurrency": {"width": "page"}, "itl_of_layouts": {}})
    assert finished.planned("figures/itl_by_concurrency-long", config=edited) == {"figure": 1}
    assert finished.planned("figures/itl_of_layouts-long", config=edited) == {}


def test_a_window_of_one_workload_runs_one_figure(finished: Flow) -> None:
    window = {"windows": {"long": {"y_min": 0.9}}}
    settings = {"itl_by_concurrency": window, "itl_of_layouts": {}, "ttft_of_layouts": {}}
    assert finished.planned(config=finished.edited("figures", settings)) == {"figure": 1, "report": 1}


def test_a_reports_text_runs_the_report(finished: Flow) -> None:
    assert finished.planned(config=finished.edited("title", "Another title")) == {"report": 1}


def test_an_slo_runs_statistics_and_report(finished: Flow) -> None:
    assert finished.planned(config=finished.edited("slo/itl_ms", 50)) == {"statistics": 1, "report": 1}


CLAIM = {
    "says": "PD's tail is lower.",
    "tests": [
        {"metric": "itl_ms", "relation": "lower", "workload": "long", "layout": "pd", "reference": "agg"}
    ],
}


@pytest.mark.parametrize(("path", "value"), [("claims", {"lower": CLAIM}), ("margin_percent", 10)])
def test_claims_and_the_margin_run_statistics_and_report(finished: Flow, path: str, value: object) -> None:
    assert finished.planned(config=finished.edited(path, value)) == {"statistics": 1, "report": 1}


def test_another_language_runs_the_report(finished: Flow) -> None:
    assert finished.planned(config=finished.edited("language", "ja")) == {"report": 1}


def test_rates_and_a_price_that_nothing_shows_run_nothing(finished: Flow) -> None:
    config = finished.edited("rates/itl_ms", 20)
    config["price"] = {"per_accelerator_hour": 3}
    assert finished.planned(config=config) == {}


def test_what_is_left_is_said_whenever_it_is_asked(finished: Flow) -> None:
    for _ in range(2):
        done = finished.run("plan_cost")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "0 of 8 cells are to be measured" in done.stdout + done.stderr
        assert "long: c=1 gives 3 requests; P50 needs 6" in done.stdout + done.stderr


def test_a_threshold_checks_again_but_measures_nothing(finished: Flow) -> None:
    config = finished.edited("thresholds/kv_moved_percent", 90)
    assert finished.planned(config=config) == {"part": 8, **AFTER_CELLS}


def test_the_clients_self_test_judges_again_but_measures_nothing(finished: Flow) -> None:
    again = {"client_floor": 1, "part": 8, **AFTER_CELLS}
    assert finished.planned(config=finished.edited("node/selftest_streams", [1, 4])) == again
    # Without one there is nothing to judge by.
    del again["client_floor"]
    assert finished.planned(config=finished.edited("node/selftest_streams", [])) == again


def test_where_ports_are_changes_plans_only(finished: Flow) -> None:
    assert finished.planned(config=finished.edited("node/base_port", 25000)) == {"plan": 2}


def test_how_long_to_wait_changes_plans_only(finished: Flow) -> None:
    assert finished.planned(config=finished.edited("engine/startup_limit_s", 45)) == {"plan": 2}


def test_another_stack_runs_every_cell(finished: Flow) -> None:
    config = finished.edited("stack/packages", {"vllm": "0.33.0"})
    assert finished.planned(config=config) == {
        "serving_environment": 1,
        "client_floor": 1,
        "probe": 1,
        "check": 1,
        "cell": 8,
        "part": 8,
        **AFTER_CELLS,
    }


def test_another_model_runs_every_cell(finished: Flow) -> None:
    config = finished.edited("model/synthetic/seed", 3)
    # A plan's script names where the model is made, and the client's self-test reads with its tokenizer.
    again = {"plan": 2, "model": 1, "client_floor": 1, "cell": 8, "part": 8, **AFTER_CELLS}
    assert finished.planned(config=config) == again


def test_another_seed_runs_every_cell(finished: Flow) -> None:
    assert finished.planned(config=finished.edited("seed", 1)) == {"cell": 8, "part": 8, **AFTER_CELLS}


def test_a_renamed_layout_keeps_the_others(finished: Flow) -> None:
    config = finished.edited("layouts/agg2", finished.config["layouts"]["agg"])
    del config["layouts"]["agg"]
    assert finished.planned(config=config) == {"plan": 1, "cell": 4, "part": 4, **AFTER_CELLS}


def test_edited_or_touched_workflow_code_measures_nothing(finished: Flow, tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(
        REPOSITORY,
        copy,
        ignore=shutil.ignore_patterns(".*", "results", "tests", "__pycache__", "benchmarks"),
    )
    script = copy / "scripts" / "cell.py"
    script.write_text(script.read_text() + "# an edit\n", encoding="utf-8")
    for path in copy.rglob("*.py"):
        os.utime(path)
    command = finished.command("-n", "--quiet", "rules")
    command[command.index("--snakefile") + 1] = str(copy / "Snakefile")
    shown = finished.run_command(command)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "Nothing to be done" in shown.stdout + shown.stderr


@pytest.mark.parametrize("lost", [(".snakemake",), (".snakemake", "store")])
def test_a_copy_that_lost_its_metadata_runs_nothing(
    finished: Flow, tmp_path: Path, lost: tuple[str, ...]
) -> None:
    copy = copied(finished, tmp_path, *lost)
    for path in sorted((copy.folder / "results").rglob("*")):
        os.utime(path)
    assert {
        name: count for name, count in copy.planned().items() if name in ("cell", "serving_environment")
    } == {}


def test_a_reverted_edit_finds_its_results_again(finished: Flow, tmp_path: Path) -> None:
    copy = copied(finished, tmp_path)
    changed = copy.edited("workloads/short/output_tokens", 6)
    assert copy.planned("tables", config=changed) == {"cell": 4, "part": 4, "tables": 1}
    assert copy.run("tables", config=changed).returncode == 0
    assert copy.gone() == []
    assert copy.planned("tables") == {"tables": 1}


def test_a_deleted_result_runs_one_cell(finished: Flow, tmp_path: Path) -> None:
    copy = copied(finished, tmp_path)
    victim = sorted(copy.results.glob("cells/*/*/*/*/bench.json"))[0]
    victim.unlink()
    assert copy.planned() == {"cell": 1, "part": 1, **AFTER_CELLS}


def test_snakemakes_own_report_has_captions_and_categories(finished: Flow) -> None:
    done = finished.run("--report", "snakemake-report.html")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (finished.folder / "snakemake-report.html").read_text(encoding="utf-8")
    for text in (
        "itl_of_layouts-long",
        "drawn from the cells that its sidecar lists",
        '"Figures"',
        '"Report"',
    ):
        assert text in page
