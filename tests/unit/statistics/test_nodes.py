# SPDX-License-Identifier: Apache-2.0
"""Layouts that were measured on several machines: the machine's effect never passes for the layout's."""

from __future__ import annotations

from synthetic import around, pools

from splitbench.experiment.claims import Claim
from splitbench.statistics.claims import judge_claims
from splitbench.statistics.verdict import verdicts
from splitbench.wording import advise, explain

SLO = {"itl_ms": 30, "ttft_ms": None, "percentile": 99}
CLAIM = {
    "says": "PD's tail is lower.",
    "tests": [
        {"metric": "itl_ms", "relation": "lower", "workload": "long", "layout": "pd4", "reference": "agg4"}
    ],
}


def pd_is_faster(workload, layout, load, metric, rng, n):
    return around(10 if layout.startswith("pd") else 20)(rng, n)


def judged(node):
    cells = pools(pd_is_faster, node=node)
    (verdict,) = verdicts(cells, SLO, 5)
    (claim,) = judge_claims({"tail": Claim.model_validate(CLAIM)}, cells, 5)
    return verdict, claim


def test_layouts_on_different_nodes_decide_nothing_and_say_so():
    verdict, claim = judged(lambda layout, restart: {"agg4": "node-a", "pd4": "node-b"}[layout])
    assert verdict["outcome"] == "undecided"
    assert verdict["reasons"][0]["code"] == "other_nodes"
    assert "different nodes (agg4 on node-a, pd4 on node-b)" in explain(verdict, "en")
    assert "node-a" in explain(verdict, "ja")
    assert advise(verdict, "en") == "Measure both layouts on the same nodes."
    assert all(one["nodes"] == [["node-a"], ["node-b"]] for one in verdict["differences"])
    assert claim["outcome"] == "not decidable"
    figures = [figure for test in claim["tests"] for figure in test["figures"]]
    assert {figure["reason"]["code"] for figure in figures} == {"other_nodes"}


def test_the_same_nodes_for_both_layouts_decide_as_one_node_does():
    verdict, claim = judged(lambda layout, restart: f"node-{restart % 2}")
    assert verdict["outcome"] == "wins"
    assert verdict["asymmetries"] == []
    assert claim["outcome"] == "reproduced"


def test_an_uneven_spread_is_told_beside_the_verdict():
    verdict, _ = judged(lambda layout, restart: "node-b" if layout == "pd4" and restart else "node-a")
    assert verdict["outcome"] == "wins"
    (told,) = verdict["asymmetries"]
    assert told["reason"] == (
        "cells are spread over nodes in another way (agg4: 9 on node-a; pd4: 3 on node-a, 6 on node-b)"
    )


def test_nodes_that_are_not_known_change_nothing():
    verdict, claim = judged(lambda layout, restart: None)
    assert (verdict["outcome"], claim["outcome"], verdict["asymmetries"]) == ("wins", "reproduced", [])
    assert not any("nodes" in one for one in verdict["differences"])
