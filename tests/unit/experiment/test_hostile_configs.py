# SPDX-License-Identifier: Apache-2.0
"""Values that are of the right type and still no good: each is refused in one line, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from splitbench.errors import UserError
from splitbench.experiment.load import read_experiment
from splitbench.workflow import REPOSITORY, Workflow
from tests.fakes.experiments import GOOD, changed

PD = "layouts/pd/connector_options"
FIGURE = "figures/itl_of_layouts"
CLAIM = {"metric": "itl_ms", "relation": "at_most", "threshold": 9, "workload": "long", "layout": "agg"}


def claims(**changes: Any) -> dict[str, Any]:
    return {"one": {"says": "it is so", "tests": [CLAIM | changes]}}


def figure(**settings: Any) -> dict[str, Any]:
    return {"itl_of_layouts": settings}


LOOP: dict[str, Any] = {}
LOOP["again"] = LOOP
DEEP: Any = 1
for _ in range(40):
    DEEP = {"a": DEEP}

# (what is changed, to what, the key that the message names, words of the problem, words of the mend)
REFUSED = [
    # Words that a command line would read as a flag: the plan's own flags could be overruled by them.
    (
        "engine",
        {"args": {"max-num-seqs": "--port"}},
        "engine.args",
        "'--port' would be read as a flag",
        "keys of",
    ),
    ("engine", {"args": {"x": ["1", "--port", "9"]}}, "engine.args", "would be read as a flag", "keys of"),
    ("engine", {"args": {"x": "-tp"}}, "engine.args", "'-tp' would be read as a flag", "keys of"),
    ("layouts/agg/args", {"x": "-"}, "layouts.agg.args", "'-' would be read as a flag", "keys of"),
    ("workloads/long/extra_args", {"x": "--seed"}, "workloads.long.extra_args", "read as a flag", "keys of"),
    ("model", {"name": "m", "hub": "--help"}, "model.hub", "'--help' names nothing on a hub", "use letters"),
    ("model", {"name": "m", "hub": "a/b c"}, "model.hub", "names nothing on a hub", "use letters"),
    ("model", {"name": "m", "hub": ""}, "model.hub", "names nothing on a hub", "use letters"),
    (
        "model",
        {"name": "m", "hub": "a/b", "revision": "-x"},
        "model.revision",
        "names nothing",
        "use letters",
    ),
    ("stack/torch_cpu_index", "--index-url=x", "stack.torch_cpu_index", "is no address", "https://"),
    ("stack/torch_cpu_index", "https://a b", "stack.torch_cpu_index", "is no address", "https://"),
    # What has no form in JSON, or none that ends: digests and engines take JSON.
    ("engine", {"args": {"x": {"y": float("inf")}}}, "engine.args", "inf has no form in JSON", "finite"),
    ("engine", {"args": {"x": float("nan")}}, "engine.args", "nan has no form in JSON", "finite"),
    ("engine", {"args": {"x": {"when": "2024-01-01"}}}, None, "", ""),
    (PD, {"x": {"y": [1, {"z": float("nan")}]}}, "layouts.pd.connector_options", "nan has no form", "finite"),
    (PD, {"x": DEEP}, "layouts.pd.connector_options", "more than 16 levels deep", "flatter"),
    (PD, {"x": LOOP}, "layouts.pd.connector_options", "more than 16 levels deep", "flatter"),
    (PD, {"x": {1: 2}}, "layouts.pd.connector_options", "1 can't be a key", "use letters"),
    (PD, {"a\nb": 1}, "layouts.pd.connector_options", r"'a\nb' can't be a key", "use letters"),
    (PD, {"x": {"$(id)": 1}}, "layouts.pd.connector_options", "'$(id)' can't be a key", "use letters"),
    ("margin_percent", float("inf"), "margin_percent", "finite number", "change"),
    ("node", {"idle_limit_s": float("inf")}, "node.idle_limit_s", "finite number", "change"),
    ("slo", {"itl_ms": float("nan")}, "slo.itl_ms", "finite number", "change"),
    (
        FIGURE.split("/")[0],
        figure(window={"x_max_ms": float("inf")}),
        "figures.itl_of_layouts.window",
        "finite",
        "",
    ),
    # Characters that no process, file or terminal takes.
    ("engine", {"env": {"REDIS_AUTH": "x"}}, "engine.env", "looks like a secret", "export it"),
    ("engine", {"env": {"A": "a\0b"}}, "engine.env", r"the character '\x00'", "take it out"),
    ("engine", {"args": {"x": "a\x1b[2Jb"}}, "engine.args", r"the character '\x1b'", "take it out"),
    ("engine", {"args": {"x": "a\u202eb"}}, "engine.args", r"the character '\u202e'", "take it out"),
    ("stack/python", "bin/py\0thon", "stack.python", "the character", "take it out"),
    ("stack/python", "", "stack.python", "names no file", "give its path"),
    ("model", {"name": "m", "path": "a\0b"}, "model.path", "the character", "take it out"),
    (
        "layouts/a\x1b[2Jb",
        {"kind": "aggregated", "cores": [0]},
        r"layouts.a\x1b[2Jb",
        "name in paths",
        "letters",
    ),
    ("layouts/a\nb", {"kind": "aggregated", "cores": [0]}, "layouts.a b", "name in paths", "letters"),
    ("experiment", "語", "experiment", "name in paths", "letters"),
    ("experiment", "tiny\n", "experiment", "name in paths", "letters"),
    ("experiment", "-rf", "experiment", "name in paths", "letters"),
    ("experiment", "x" * 5000, "experiment", "name in paths", "letters"),
    # Numbers that nothing can be made of.
    ("matrix/restarts", 10**9, "matrix", "8,000,000,000 cells", "stay below 100,000"),
    ("matrix/restarts", 10**30, "matrix.restarts", "less than 2147483648", "change"),
    ("matrix/concurrency", [2**31], "matrix.concurrency[0]", "less than 2147483648", "change"),
    ("workloads/long/prompts", {"minimum": 2**30}, "workloads.long", "1,073,741,824 prompts", "stay below"),
    ("workloads/long/concurrency", [4, 4], "workloads.long.concurrency", "twice", "remove one"),
    (
        "workloads/long/prompts",
        {"percentile": 1e-300},
        "workloads.long.prompts.percentile",
        "greater than",
        "",
    ),
    ("slo", {"percentile": 99.99999999999999}, "slo.percentile", "less than or equal to 99.999", "change"),
    ("seed", 2**63, "seed", "less than", "change"),
    # Names of what is not there: figures and claims come after all the measuring.
    (
        "figures",
        figure(percentiles=[0, 50]),
        "figures.itl_of_layouts.percentiles[0]",
        "greater than",
        "change",
    ),
    (
        "figures",
        figure(layouts=["aggr"]),
        "figures.itl_of_layouts.layouts",
        "no layout 'aggr'",
        "agg, pd, tp, two",
    ),
    ("figures", figure(windows={"lang": {}}), "figures.itl_of_layouts.windows.lang", "no workload", "long"),
    (
        "figures",
        figure(concurrency=3),
        "figures.itl_of_layouts.concurrency",
        "not measured at 3",
        "every workload",
    ),
    (
        "figures",
        figure(concurrencies=[1, 3]),
        "figures.itl_of_layouts.concurrencies",
        "concurrency 3",
        "1, 2",
    ),
    ("claims", claims(statistic="p0"), "claims.one.tests[0].statistic[0]", "'p0' is no statistic", "p99.5"),
    ("claims", claims(statistic="p٩٩"), "claims.one.tests[0].statistic[0]", "is no statistic", "p99.5"),
    ("claims", claims(statistic="p99.99999"), "claims.one.tests[0].statistic[0]", "is no statistic", "p99.5"),
    ("claims", claims(layout="ag"), "claims.one.tests[0].layout", "no layout 'ag'", "agg"),
    ("engine", {"args": {"x": [[1]]}}, "engine.args", "holds numbers and text", "change what else"),
    ("engine", {"args": {"x": {1, 2}}}, "engine.args", "is a set", "in quotes"),
    # Where a word or a mapping may stand, the message is about the one that does.
    (
        "layouts/tp/share",
        {"mps_percent": 0},
        "layouts.tp.share.mps_percent",
        "greater than or equal to 1",
        "",
    ),
    ("layouts/tp/share", {"mps": 1}, "layouts.tp.share.mps:", "unknown key", "mps_percent"),
    ("layouts/tp/share", "time-slice", "layouts.tp.share", "'time-sliced'", "change"),
    ("layouts/tp/share", 5, "layouts.tp.share", "'time-sliced'", "change"),
    # Keys that are no text.
    ("layouts/agg/True", 1, "layouts.agg.True", "unknown key", ""),
    ("workloads/1", {"input_tokens": 1, "output_tokens": 1}, None, "", ""),
]


@pytest.mark.parametrize(("path", "value", "key", "problem", "mend"), REFUSED)
def test_a_hostile_value_is_refused_in_one_line(
    tmp_path: Path, path: str, value: Any, key: str | None, problem: str, mend: str
) -> None:
    file = tmp_path / "bad.yaml"
    config = {"figures": {}, "claims": {}} | changed(path, value)
    file.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    if key is None:  # a near miss that is right
        read_experiment(file)
        return
    with pytest.raises(UserError) as caught:
        read_experiment(file)
    lines = str(caught.value).split("\n")
    assert all(line.startswith(str(file)) and line.isprintable() and len(line) < 1000 for line in lines)
    line = next((line for line in lines if f": {key}" in line), None)
    assert line is not None, lines
    assert problem in line
    assert mend in line
    assert not any("MpsShare" in line or "literal[" in line for line in lines)


TEXTS = [
    ("a: 2024-99-99", "not valid YAML (month must be in 1..12"),
    ("a: !!int x", "not valid YAML (invalid literal for int"),
    ("a: !!timestamp x", "not valid YAML"),
    ("a: !!python/object/apply:os.system [id]", "not valid YAML (could not determine a constructor"),
    ("a: " + "[" * 3000, "not valid YAML"),
    ("a: \x00", "cannot be read|not valid YAML"),
    ("? [a]\n: b", "not valid YAML (found unhashable key"),
    ("1: 2", "the key 1 is no text; put it in quotes"),
    ("null: 2", "the key None is no text"),
]


@pytest.mark.parametrize(("text", "words"), TEXTS)
def test_hostile_yaml_is_said_to_be_so(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_experiment(file)
    lines = str(caught.value).split("\n")
    assert any(word in str(caught.value) for word in words.split("|")), lines
    assert all(line.startswith(str(file)) and line.isprintable() for line in lines)


def test_negative_numbers_and_text_with_dashes_inside_are_no_flags() -> None:
    args = {"k1": -1, "k2": "-1.5e-3", "k3": "x--y", "k4": ["-2", 3], "k5": {"f": "--g"}}
    flow = Workflow(GOOD | {"engine": {"args": args}}, [], REPOSITORY)
    argv = flow.cells.plans["agg"].engines[0].argv
    assert argv[argv.index("--k1") :] == (
        *("--k1", "-1", "--k2", "-1.5e-3", "--k3", "x--y", "--k4", "-2", "3", "--k5", '{"f":"--g"}'),
    )
