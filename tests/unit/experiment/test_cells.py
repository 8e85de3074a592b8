# SPDX-License-Identifier: Apache-2.0
"""Cells: one per combination, keyed by what they depend on, seeded alike in every layout, in blocks at random."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest

from splitbench.experiment.cells import Cells
from splitbench.experiment.load import load_experiment
from splitbench.workflow import Workflow
from tests.fakes.experiments import GOOD


def cells_of(config: dict[str, Any]) -> Cells:
    return Cells(load_experiment(config), Path())


def edited(section: str, **changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(GOOD)
    config[section] = config.get(section, {}) | changes
    return config


def test_one_cell_per_combination() -> None:
    cells = cells_of(edited("matrix", restarts=2, repeats=3))
    assert len(cells) == 4 * 1 * 2 * 2 * 3
    assert len(set(cells.ids)) == len(cells)
    assert {cell.prompts for cell in cells.all} == {10, 20}


def test_seeds_pair_layouts_and_differ_between_loads_and_repeats() -> None:
    cells = cells_of(edited("matrix", restarts=2, repeats=2))
    seeds: dict[tuple[int, int], set[int]] = {}
    for cell in cells.all:
        seeds.setdefault((cell.concurrency, cell.repeat), set()).add(cell.seed)
    assert all(len(found) == 1 for found in seeds.values())
    assert len({seed for found in seeds.values() for seed in found}) == 4


def test_another_experiment_seed_gives_other_seeds() -> None:
    first, second = cells_of(GOOD), cells_of(GOOD | {"seed": 1})
    assert not {cell.seed for cell in first.all} & {cell.seed for cell in second.all}


def test_order_is_a_block_per_bring_up_and_the_same_every_time() -> None:
    config = edited("matrix", restarts=2, concurrency=[1, 2, 4, 8])
    cells = cells_of(config)
    ordered = sorted(cells.all, key=lambda cell: cells.order(cell.cell_id))
    blocks = [key for key, _ in itertools.groupby(ordered, key=lambda cell: (cell.layout, cell.restart))]
    assert len(blocks) == len(set(blocks)) == 4 * 2
    assert [cell.cell_id for cell in ordered] == [
        cell.cell_id for cell in sorted(cells_of(config).all, key=lambda c: cells.order(c.cell_id))
    ]
    inside = [cell.concurrency for cell in ordered if (cell.layout, cell.restart) == blocks[0]]
    assert sorted(inside) == [1, 2, 4, 8]
    assert any(
        [cell.concurrency for cell in ordered if (cell.layout, cell.restart) == block] != [1, 2, 4, 8]
        for block in blocks
    )


@pytest.mark.parametrize(
    ("section", "changes", "same"),
    [
        ("node", {"base_port": 30000}, True),
        ("node", {"idle_limit_s": 9}, True),
        ("engine", {"startup_limit_s": 9}, True),
        ("slo", {"itl_ms": 9}, True),
        ("thresholds", {"kv_moved_percent": 9}, True),
        ("figures", {"itl_of_layouts": {}}, True),
        ("matrix", {"repeats": 2}, True),
        ("engine", {"args": {"max-num-seqs": 9}}, False),
        ("engine", {"env": {"A": "b"}}, False),
        ("stack", {"packages": {"vllm": "2"}}, False),
        ("model", {"synthetic": {"seed": 9}}, False),
    ],
)
def test_ids_change_with_what_results_depend_on_and_with_nothing_else(
    section: str, changes: dict[str, Any], same: bool
) -> None:
    before, after = set(cells_of(GOOD).ids), set(cells_of(edited(section, **changes)).ids)
    assert before <= after if same else not before & after


def test_a_port_of_an_engine_is_where_it_listens_not_what_it_is() -> None:
    config = copy.deepcopy(GOOD)
    config["layouts"]["agg"]["port"] = 31000
    cells = cells_of(config)
    assert set(cells.ids) == set(cells_of(GOOD).ids)
    assert cells.plans["agg"].front_port == 31000


def test_digests_tell_every_cell_apart() -> None:
    cells = cells_of(edited("matrix", restarts=2, repeats=2))
    assert len({cell.digest for cell in cells.all}) == len(cells)


def test_listed_order_is_the_configs_and_changes_no_cell() -> None:
    listed = edited("matrix", order="listed", concurrency=[8, 1, 4])
    cells = cells_of(listed)
    ordered = sorted(cells.all, key=lambda cell: cells.order(cell.cell_id))
    loads = [(layout, load) for layout in GOOD["layouts"] for load in (8, 1, 4)]
    assert [(cell.layout, cell.concurrency) for cell in ordered] == loads
    shuffled = cells_of(edited("matrix", concurrency=[8, 1, 4]))
    assert set(shuffled.ids) == set(cells.ids)
    assert [shuffled.order(cell) for cell in shuffled.ids] != [cells.order(cell) for cell in cells.ids]


def test_the_config_is_named_from_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, named in (
        (tmp_path / "config" / "my own.yaml", "--configfile 'config/my own.yaml'"),
        (tmp_path / "config" / "config.yaml", ""),
        (Path("config/config.yaml"), ""),
        (Path("/elsewhere/x.yaml"), "--configfile /elsewhere/x.yaml"),
    ):
        assert Workflow(copy.deepcopy(GOOD), [file]).config_argument == named
