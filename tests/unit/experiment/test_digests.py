# SPDX-License-Identifier: Apache-2.0
"""Digests and keys, to the letter: results of earlier versions are found by them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from splitbench.errors import DamagedError
from splitbench.experiment.cells import (
    Cells,
    load_slice,
    model_slice,
    prompts_for,
    seed_of,
    stack_slice,
)
from splitbench.experiment.load import load_experiment
from splitbench.files import (
    canonical_json,
    digest,
    digest8,
    read_json,
    sha256_file,
    write_json,
    write_text,
    written_aside,
)
from splitbench.statistics.quantiles import needed
from splitbench.workflow import REPOSITORY
from tests.fakes.experiments import GOOD


def test_canonical_json_is_sorted_tight_and_not_escaped() -> None:
    value = {"b": [1, 2.5, None, True], "a": {"z": "é語", "y": ""}}
    assert canonical_json(value) == '{"a":{"y":"","z":"é語"},"b":[1,2.5,null,true]}'
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            canonical_json(bad)
    text = hashlib.sha256('{"a":"é"}'.encode()).hexdigest()
    assert (digest({"a": "é"}), digest8({"a": "é"})) == (text, text[:8])


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "er" / "a.json"
    write_json(path, {"b": 1, "a": "語"})
    assert path.read_bytes() == '{\n  "a": "語",\n  "b": 1\n}\n'.encode()
    write_text(path, "x")  # the folder is there already
    assert (path.read_text(), sha256_file(path)) == ("x", hashlib.sha256(b"x").hexdigest())
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": math.nan})
    with pytest.raises(RuntimeError), written_aside(path) as aside:
        assert (aside.parent, aside.name[:8], aside.suffix) == (path.parent, ".a.json.", ".part")
        aside.write_text("half")
        raise RuntimeError
    assert path.read_text() == "x"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_results_follow_the_umask_and_leave_it(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "a", "x")
        now = os.umask(mask)
    finally:
        os.umask(before)
    assert (stat.S_IMODE((tmp_path / "a").stat().st_mode), now) == (mode, mask)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1}x', "\ufeff{}", "[" * 100_000])
def test_a_damaged_record_is_said_to_be_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DamagedError, match=r"record\.json: is damaged .*; delete it") as caught:
        read_json(path)
    assert str(caught.value).isprintable()
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(DamagedError):
        read_json(path)


def cells(**changes: Any) -> Cells:
    return Cells(load_experiment(GOOD | changes), REPOSITORY)


def test_slices_hold_what_counts_and_nothing_else() -> None:
    experiment = load_experiment(GOOD)
    assert stack_slice(experiment, REPOSITORY) == {"name": "stub", "packages": {"vllm": "1"}}
    assert load_slice(experiment, experiment.workloads["long"]) == {
        "dataset": "random",
        "input_tokens": 100,
        "output_tokens": 8,
        "prompts": {"per_concurrency": 10, "minimum": 1},
        "warmup_per_concurrency": 1,
        "extra_args": {},
        "experiment_seed": 0,
        "measuring_version": 1,
    }
    later = {"range_ratio": 0.5, "request_rate": 2.0, "burstiness": 0.5, "prompts": {"percentile": 90}}
    loaded = load_experiment(GOOD | {"seed": 3, "workloads": {"long": GOOD["workloads"]["long"] | later}})
    found = load_slice(loaded, loaded.workloads["long"])
    assert {key: found[key] for key in ("range_ratio", "request_rate", "burstiness")} == {
        "range_ratio": 0.5,
        "request_rate": 2.0,
        "burstiness": 0.5,
    }
    assert (found["prompts"]["percentile"], found["experiment_seed"]) == (90, 3)
    assert model_slice(experiment)["synthetic"]["layers"] == 4
    assert "path" not in model_slice(experiment)
    locked = load_experiment(GOOD | {"stack": {"name": "s", "lock": "envs/uv.lock"}})
    found = stack_slice(locked, REPOSITORY)
    assert set(found) == {"name", "lock_digest"}
    assert len(found["lock_digest"]) == 64


def test_a_cell_is_what_its_slice_says() -> None:
    found = cells(matrix={"concurrency": [1, 4], "restarts": 2, "repeats": 3})
    assert len(found) == len(found.ids) == 4 * 2 * 2 * 3
    cell = next(c for c in found.all if (c.layout, c.concurrency, c.restart, c.repeat) == ("pd", 4, 1, 2))
    load = dict(cell.load)
    layout = {"plan_digest": cell.plan_digest, "model": dict(cell.model), "stack": dict(cell.stack)}
    assert cell.slice == {
        "layout": layout | {"name": "pd"},
        "workload": load | {"name": "long"},
        "concurrency": 4,
        "restart": 1,
        "repeat": 2,
        "prompts": 40,
        "warmups": 4,
        "seed": cell.seed,
    }
    assert cell.digest == digest(cell.slice)
    assert cell.cell_id == f"pd-{digest(layout)[:8]}/long-{digest(load)[:8]}/c4/1-2"
    assert found[cell.cell_id] is cell
    assert json.loads(canonical_json(cell.slice)) == cell.slice


def test_seeds_and_orders_of_earlier_versions_stay() -> None:
    assert seed_of(0, {"a": 1}, 4, 2) == 0x7FFFFFFF & int(
        hashlib.sha256(f"0/{digest({'a': 1})}/4/2".encode()).hexdigest()[:8], 16
    )
    found = cells(matrix={"concurrency": [1, 4], "restarts": 2})
    by_load: dict[tuple[int, int], set[int]] = {}
    for cell in found.all:
        by_load.setdefault((cell.concurrency, cell.repeat), set()).add(cell.seed)
    # Paired across layouts and restarts, apart between loads.
    assert [len(seeds) for seeds in by_load.values()] == [1, 1]
    assert len(set.union(*by_load.values())) == 2
    blocks: list[tuple[int, str]] = []
    for cell in sorted(found.all, key=lambda one: found.order(one.cell_id)):
        if (cell.restart, cell.layout) not in blocks[-1:]:
            blocks.append((cell.restart, cell.layout))
    assert len(blocks) == len(set(blocks)) == 8
    assert [restart for restart, _ in blocks] == [0] * 4 + [1] * 4
    listed = cells(matrix={"concurrency": [4, 1], "restarts": 2, "order": "listed"})
    ordered = sorted(listed.all, key=lambda one: listed.order(one.cell_id))
    assert [(c.restart, c.layout, c.concurrency) for c in ordered] == [
        (restart, layout, load) for restart in (0, 1) for layout in GOOD["layouts"] for load in (4, 1)
    ]
    assert blocks[:4] != [(0, layout) for layout in GOOD["layouts"]]


@pytest.mark.parametrize(
    ("percentile", "requests"), [(50, 6), (90, 36), (95, 72), (99, 368), (99.5, 736), (99.9, 3688), (10, 36)]
)
def test_prompts_for_a_percentile(percentile: float, requests: int) -> None:
    assert prompts_for(percentile) == requests == needed(percentile / 100)
    assert prompts_for(percentile, 0.5) == needed(percentile / 100, 0.5)
    long = GOOD["workloads"]["long"] | {
        "prompts": {"percentile": percentile, "per_concurrency": 2, "minimum": 5}
    }
    found = {cell.concurrency: cell.prompts for cell in cells(workloads={"long": long}).all}
    assert found == {load: max(requests, 5, 2 * load) for load in (1, 2)}
