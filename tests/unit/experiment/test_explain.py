# SPDX-License-Identifier: Apache-2.0
"""`config explain`: every key has words, a type and the truth about what its change runs again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from splitbench.errors import UserError
from splitbench.experiment.cells import Cells
from splitbench.experiment.explain import UNSAID, all_keys, explain, find_keys
from splitbench.experiment.load import load_experiment
from tests.fakes.experiments import GOOD


def test_every_key_has_a_meaning_a_type_and_a_rerun() -> None:
    keys = all_keys()
    assert len(keys) > 100
    for key in keys:
        assert key.meaning, f"{key.path}: give the field a description in the models"
        assert key.type
        assert key.reruns != UNSAID, (
            f"{key.path}: say in splitbench/experiment/explain.py what a change runs again"
        )


# (path in the config, another value, the key as `explain` is asked for it)
CHANGES: list[tuple[str, Any, str]] = [
    ("seed", 5, "seed"),
    ("title", "t", "title"),
    ("stack/name", "other", "stack.name"),
    ("stack/python", "elsewhere/python", "stack.python"),
    ("stack/packages", {"vllm": "2"}, "stack.packages"),
    ("stack/torch_cpu_index", "https://x", "stack.torch_cpu_index"),
    ("model/name", "n", "model.name"),
    ("model/synthetic", {"layers": 2}, "model.synthetic.layers"),
    ("node/base_port", 20000, "node.base_port"),
    ("node/idle_limit_s", 1.0, "node.idle_limit_s"),
    ("engine/args", {"max-num-seqs": 4}, "engine.args"),
    ("engine/env", {"A": "b"}, "engine.env"),
    ("engine/startup_limit_s", 3.0, "engine.startup_limit_s"),
    ("layouts/agg/cores", [0], "layouts.agg.cores"),
    ("layouts/agg/port", 31000, "layouts.agg.port"),
    ("layouts/agg/startup_limit_s", 31.0, "layouts.agg.startup_limit_s"),
    ("layouts/agg/args", {"max-num-seqs": 4}, "layouts.agg.args"),
    ("layouts/pd/connector", "lmcache", "layouts.pd.connector"),
    ("layouts/pd/decode/port", 31000, "layouts.pd.decode.port"),
    ("layouts/tp/memory_share", 0.5, "layouts.tp.memory_share"),
    ("workloads/long/input_tokens", 9, "workloads.long.input_tokens"),
    ("workloads/long/prompts", {"minimum": 50}, "workloads.long.prompts.minimum"),
    ("workloads/long/extra_args", {"top-p": 0.9}, "workloads.long.extra_args"),
    ("matrix/concurrency", [1, 2, 3], "matrix.concurrency"),
    ("matrix/repeats", 2, "matrix.repeats"),
    ("thresholds/kv_moved_percent", 50.0, "thresholds.kv_moved_percent"),
    ("slo/itl_ms", 7.0, "slo.itl_ms"),
    ("figures/itl_of_layouts", {"slo_ms": 3}, "figures.itl_of_layouts.slo_ms"),
]


@pytest.mark.parametrize(("path", "value", "asked"), CHANGES)
def test_what_it_says_runs_again_is_what_runs_again(path: str, value: Any, asked: str) -> None:
    config = copy.deepcopy(GOOD)
    *parents, last = path.split("/")
    place = config
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    before, after = (set(Cells(load_experiment(each), Path()).ids) for each in (GOOD, config))
    said = find_keys(asked)[0].reruns
    layout = parents[1] if parents[:1] == ["layouts"] else None
    expected = {
        "every cell": not before & after,
        "the cells of that layout, and what is drawn from them": before & after
        == {cell for cell in before if not cell.startswith(f"{layout}-")},
        "the cells of that workload, and what is drawn from them": not before
        & after,  # GOOD has one workload
        "the cells that are new, and what is drawn from all of them": before < after,
    }
    assert expected.get(said, before == after), (said, sorted(before - after))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("slo.itl_ms", "number above 0"),
        ("layouts.agg-tp4.gpus", "list of whole numbers"),
        ("layouts.pd.prefill[0].tp", "default  all GPUs given"),
        ("layouts.NAME.connector", "one of nixl, lmcache, lmcache-mp"),
        ("figures", "itl_tail_of_layouts"),
        ("workloads.long.prompts", "workloads.NAME.prompts.minimum"),
        ("layouts.agg-tp4", "layouts.NAME.connector "),
        ("figures.itl_of_layouts", "a name that you give; below it may stand"),
    ],
)
def test_keys_are_found_as_people_write_them(asked: str, words: str) -> None:
    assert words in explain(asked)


def test_without_a_key_the_sections() -> None:
    text = explain(None)
    assert "layouts" in text and "slo" in text and "layouts.NAME.tp" not in text


@pytest.mark.parametrize(
    ("asked", "near"),
    [("base_port", "node.base_port"), ("slo.itl", "slo.itl_ms"), ("zzz", "lists the sections")],
)
def test_an_unknown_key_is_one_line_with_the_nearest(asked: str, near: str) -> None:
    with pytest.raises(UserError) as caught:
        explain(asked)
    assert near in str(caught.value)
    assert "\n" not in str(caught.value)
