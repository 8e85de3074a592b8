# SPDX-License-Identifier: Apache-2.0
"""Each check tells a sound cell from a broken one, with the reason in words."""

from __future__ import annotations

from typing import Any

import pytest
from made_up import bench, engine, evidence, pd

from splitbench.measuring import checks
from splitbench.measuring.checks import Check, EngineEvidence


def by_name(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


def test_a_sound_cell_passes_all() -> None:
    found = checks.all_checks(pd(512, 8))
    assert [check.name for check in found] == [
        "completion",
        "tokens",
        "coalescing",
        "warm-up",
        "fresh-prompts",
        "kv-moved",
        "same-answers",
        "transport",
        "load",
        "client",
        "machine",
        "server-log",
        "samples",
    ]
    assert {check.verdict for check in found} == {"ok"}, [c for c in found if c.verdict != "ok"]
    assert checks.worst(found) == "ok"


def test_kv_moved_is_not_asked_of_an_aggregated_layout() -> None:
    assert "kv-moved" not in by_name(checks.all_checks(evidence()))


@pytest.mark.parametrize(
    ("changes", "name", "verdict", "words"),
    [
        (
            {"bench": bench(errors=["boom"] + [""] * 7)},
            "completion",
            "invalid",
            "1 of 8 requests failed: boom",
        ),
        ({"bench": bench(errors=["x"] * 8)}, "completion", "invalid", "8 of 8 requests failed"),
        ({"bench": bench(errors=["x"] * 8)}, "tokens", "invalid", "no request succeeded"),
        ({"bench": bench(errors=["x"] * 8)}, "coalescing", "invalid", "no request succeeded"),
        ({"prompts": 10}, "completion", "invalid", "8 of 10 requests were sent"),
        ({"bench": bench(output_lens=[15] + [16] * 7)}, "tokens", "invalid", "1 of 8 requests made another"),
        ({"output_tokens": 17}, "tokens", "invalid", "8 of 8 requests made another number of tokens than 17"),
        ({"bench": bench(input_lens=[63] * 8)}, "tokens", "invalid", "off by up to 1.56 %"),
        ({"input_tokens": 8192, "bench": bench(input_lens=[8179] * 8)}, "tokens", "warn", "0.16 %"),
        ({"bench": bench(itls=[[0.012] * 8] * 8)}, "coalescing", "invalid", "100.0 % of requests"),
        ({"bench": bench(itls=[[0.012] * 14 + [1e-6]] * 8)}, "coalescing", "invalid", "6.7 % of ITLs"),
        ({"bench": bench(50, itls=[[0.012] * 15] * 49 + [[0.012] * 14])}, "coalescing", "warn", "2.0 %"),
        ({"warmups": 3}, "warm-up", "invalid", "3 warm-up requests for 4 in flight"),
        ({"warmup_seed_differs": False}, "warm-up", "invalid", "among the measured"),
        ({"engines": {"e": engine("aggregated", hits=256)}}, "fresh-prompts", "invalid", "50.0 %"),
        ({"engines": {"e": EngineEvidence("aggregated", {}, {})}}, "fresh-prompts", "warn", "not proven"),
    ],
)
def test_a_broken_cell_is_called_so(changes: dict[str, Any], name: str, verdict: str, words: str) -> None:
    check = by_name(checks.all_checks(evidence(**changes)))[name]
    assert check.verdict == verdict
    assert words in check.reason


def test_tiny_itls_are_measured_against_the_median_where_steps_are_short() -> None:
    quick = bench(gap_s=0.0015)  # a tenth of the median is 0.15 ms, less than 0.2 ms
    assert checks.coalescing(evidence(bench=quick)).verdict == "ok"
    quick["itls"] = [[0.0015] * 14 + [0.000175]] * 8
    assert checks.coalescing(evidence(bench=quick)).verdict == "ok"


@pytest.mark.parametrize(
    ("moved", "computed", "verdict"),
    [(512, 0, "ok"), (504, 8, "ok"), (499, 13, "ok"), (498, 14, "invalid"), (0, 512, "invalid")],
)
def test_decoders_must_load_what_was_prefilled(moved: float, computed: float, verdict: str) -> None:
    check = checks.kv_moved(pd(moved, computed))
    assert check is not None
    assert check.verdict == verdict
    assert check.figures["loaded_tokens"] == moved


def test_hits_alone_do_not_prove_that_kv_moved() -> None:
    decoder = engine("decode", queries=512, hits=512)
    check = checks.kv_moved(evidence(kind="pd", engines={"decode-0": decoder}))
    assert check is not None
    assert check.verdict == "invalid"
    assert "does not count loaded tokens" in check.reason


def test_the_worst_check_decides() -> None:
    found = [Check("a", "ok", ""), Check("b", "warn", ""), Check("c", "ok", "")]
    assert checks.worst(found) == "warn"
    assert checks.worst([*found, Check("d", "invalid", "")]) == "invalid"
