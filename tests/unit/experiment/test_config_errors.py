# SPDX-License-Identifier: Apache-2.0
"""Every mistake in a config gives one line: file, line, key, what is wrong, what to do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitbench.errors import UserError
from splitbench.experiment.load import load_experiment, read_experiment, read_yaml
from tests.fakes.experiments import GOOD


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good config with one value changed; DELETE removes it."""
    config = copy.deepcopy(GOOD)
    *parents, last = path.split("/")
    place: Any = config
    for part in parents:
        place = place[int(part) if isinstance(place, list) else part]
    key: Any = int(last) if isinstance(place, list) else last
    if value is DELETE:
        del place[key]
    else:
        place[key] = value
    return config


DELETE = object()
MPS = {"mps_percent": 60}
TRACED_ROUTER = {
    "kind": "replicas",
    "router": "vllm-router",
    "trace": True,
    "replicas": [{"gpus": [0]}, {"gpus": [1]}],
}


def one_gpu(prefill: Any, decode: Any, memory_share: float | None = 0.4) -> dict[str, Any]:
    """A layout of two engines on one GPU, with these shares; {}: none."""
    engine = {"gpus": [0]} | ({"memory_share": memory_share} if memory_share else {})
    sides = [engine | ({"share": share} if share else {}) for share in (prefill, decode)]
    return {"kind": "pd", "connector": "nixl", "prefill": sides[0], "decode": sides[1]}


def lmcache(prefill: list[int], decode: list[int], **both: int) -> dict[str, Any]:
    """A layout over LMCache on these GPUs."""
    sides = {"prefill": {"gpus": prefill} | both, "decode": {"gpus": decode} | both}
    return {"kind": "pd", "connector": "lmcache"} | sides


# (what is changed, to what, the key that the message names, words of the problem, words of the mend)
MISTAKES = [
    ("layoutz", {}, "layoutz", "unknown key", "did you mean 'layouts'?"),
    ("layouts/agg/coress", [1], "layouts.agg.coress", "unknown key", "did you mean 'cores'?"),
    ("layouts/pd/prefill/gpuss", [1], "layouts.pd.prefill[0].gpuss", "unknown key", "did you mean 'gpus'?"),
    ("matrix/zzz", 1, "matrix.zzz", "unknown key", "use one of: concurrency"),
    ("experiment", DELETE, "experiment", "is missing", "add it"),
    ("layouts", DELETE, "layouts", "is missing", "add it"),
    ("workloads/long/input_tokens", DELETE, "workloads.long.input_tokens", "is missing", "add it"),
    ("workloads/long/input_tokens", "many", "workloads.long.input_tokens", "valid integer", "change"),
    ("workloads/long/input_tokens", 0, "workloads.long.input_tokens", "greater than 0", "change"),
    ("workloads/long/input_tokens", 1.5, "workloads.long.input_tokens", "integer", "change"),
    ("matrix/concurrency", [], "matrix.concurrency", "at least 1 item", "name at least one"),
    ("matrix/concurrency", [1, 1], "matrix", "twice", "remove one"),
    ("matrix/concurrency", 4, "matrix.concurrency", "list", "change"),
    ("layouts", {}, "layouts", "at least 1 item", "name at least one"),
    ("workloads", {}, "workloads", "at least 1 item", "name at least one"),
    ("layouts/agg/kind", "aggregate", "layouts.agg.kind", "unknown kind", "aggregated, replicas, pd"),
    ("layouts/agg/kind", DELETE, "layouts.agg.kind", "'kind' is missing", "aggregated, replicas, pd"),
    ("layouts/agg/cores", DELETE, "layouts.agg", "exactly one of 'cores' and 'gpus'", ""),
    ("layouts/agg/gpus", [0], "layouts.agg", "exactly one of 'cores' and 'gpus'", ""),
    ("layouts/agg/cores", [0, 0], "layouts.agg", "named twice", ""),
    ("layouts/agg/cores", [-1], "layouts.agg.cores[0]", "greater than or equal to 0", "change"),
    ("layouts/agg/tp", 2, "layouts.agg", "tp, pp and dp must be 1", "replicas"),
    ("layouts/tp/tp", 2, "layouts.tp", "tp x pp x dp is 2 but 4 GPUs", "make them equal"),
    ("layouts/pd/decode", {"cores": [0]}, "layouts.pd", "core 0 is used by two engines", "own devices"),
    ("layouts/pd/decode", {"gpus": [0]}, "layouts.pd", "some engines are on cores", "one kind"),
    ("layouts/pd/connector", "nix", "layouts.pd.connector", "'nixl'", "change"),
    ("layouts/pd/connector", DELETE, "layouts.pd.connector", "is missing", "add it"),
    ("layouts/pd/first_token", "prefiller", "layouts.pd", "always takes the first token", ""),
    ("layouts/two/replicas", [{"cores": [0]}], "layouts.two.replicas", "at least 2 items", "more"),
    (
        "layouts/two/replicas",
        [{"cores": [0], "port": 9000}, {"cores": [1], "port": 9000}],
        "layouts.two",
        "port 9000 is given to two engines",
        "own port",
    ),
    (
        "layouts/bad name",
        {"kind": "aggregated", "cores": [0]},
        "layouts.bad name",
        "name in paths",
        "letters",
    ),
    ("layouts/..%2Fx", {"kind": "aggregated", "cores": [0]}, "layouts.", "name in paths", "letters"),
    ("layouts/AGG", {"kind": "aggregated", "cores": [0]}, "layouts.agg", "only by case", "rename"),
    ("experiment", "a/b", "experiment", "name in paths", "letters"),
    ("experiment", "../../etc", "experiment", "name in paths", "letters"),
    ("experiment", "$(touch x)", "experiment", "name in paths", "letters"),
    ("engine", {"args": {"port": 1}}, "engine.args", "'port' is set by the plan", "remove it"),
    ("engine", {"args": {"no-headless": True}}, "engine.args", "is set by the plan", "remove it"),
    ("engine", {"args": {"tensor-par": 2}}, "engine.args", "is set by the plan", "remove it"),
    ("engine", {"args": {"kv-transfer-config.role": "x"}}, "engine.args", "is set by the plan", "remove it"),
    ("engine", {"args": {"config": "flags.yaml"}}, "engine.args", "is set by the plan", "remove it"),
    ("engine", {"env": {"CUDA_MPS_PIPE_DIRECTORY": "/x"}}, "engine.env", "is set by the plan", "remove it"),
    ("layouts/agg/share", "time-sliced", "layouts.agg", "'share' is for GPUs", "cores of its own"),
    ("layouts/one", one_gpu("time-sliced", {}), "layouts.one", "GPU 0 is used by two engines", "'share'"),
    ("layouts/one", one_gpu("time-sliced", MPS), "layouts.one", "GPU 0 is shared in two ways", "same kind"),
    ("layouts/one", one_gpu(MPS, MPS), "layouts.one", "60 + 60 = 120 %", "at most 100"),
    (
        "layouts/one",
        one_gpu("time-sliced", "time-sliced", memory_share=None),
        "layouts.one",
        "not all say how much of its memory",
        "memory_share or kv_cache_bytes",
    ),
    (
        "layouts/one",
        one_gpu("time-sliced", "time-sliced", memory_share=0.6),
        "layouts.one",
        "memory shares of GPU 0 sum to 1.2",
        "less than 1",
    ),
    (
        "layouts/one",
        {"kind": "aggregated", "gpus": [0], "memory_share": 0.5, "args": {"gpu-memory-utilization": 0.6}},
        "layouts.one",
        "stated twice",
        "keep one",
    ),
    ("layouts/pd/trace", "maybe", "layouts.pd.trace", "boolean", "change"),
    ("layouts/two", TRACED_ROUTER, "layouts.two", "only the built-in proxy writes a trace", "router builtin"),
    ("layouts/lm", lmcache([0, 1], [2]), "layouts.lm", "2 prefill ranks have only 1", "use nixl"),
    ("layouts/lm", lmcache([0, 1], [2, 3], dp=2), "layouts.lm", "pp and dp must be 1", "more engines"),
    ("engine", {"args": {"--max-num-seqs": 1}}, "engine.args", "not a flag name", "without dashes"),
    ("engine", {"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "engine.env", "is set by the plan", "remove it"),
    ("engine", {"env": {"HF_TOKEN": "x"}}, "engine.env", "looks like a secret", "export it"),
    ("engine", {"env": {"A B": "x"}}, "engine.env", "not a name for an environment variable", "use letters"),
    ("layouts/agg/args", {"tensor-parallel-size": 2}, "layouts.agg.args", "set by the plan", "remove it"),
    ("workloads/long/extra_args", {"seed": 1}, "workloads.long.extra_args", "set by the plan", "remove it"),
    ("workloads/long/output_tokens", 100000, "workloads.long", "don't fit model.synthetic", "shorten"),
    ("model", {"name": "m"}, "model", "exactly one of 'synthetic', 'path' and 'hub'", ""),
    ("model", {"name": "m", "hub": "a/b", "path": "x"}, "model", "exactly one of", ""),
    ("stack", {"name": "s"}, "stack", "exactly one of 'lock' (build it) and 'python' (use it)", ""),
    ("stack", {"name": "s", "python": "p"}, "stack", "at least vllm's version", ""),
    ("node", {"base_port": 80}, "node.base_port", "greater than or equal to 1024", "change"),
    ("slo", {"percentile": 100}, "slo.percentile", "less than 100", "change"),
    (
        "figures",
        {"itl_of_layouts": {"window": {"x_min_ms": 5, "x_max_ms": 1}}},
        "figures.itl_of_layouts.window",
        "must be below",
        "",
    ),
    ("figures", {"itl": {}}, "figures.itl", "itl_by_concurrency", ""),
    ("seed", -1, "seed", "greater than or equal to 0", "change"),
    ("seed", "abc", "seed", "integer", "change"),
]


@pytest.mark.parametrize(("path", "value", "key", "problem", "mend"), MISTAKES)
def test_one_line_names_file_key_and_mend(
    tmp_path: Path, path: str, value: Any, key: str, problem: str, mend: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(changed(path, value)), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_experiment(file)
    lines = str(caught.value).splitlines()
    line = next((line for line in lines if f": {key}" in line), None)
    assert line is not None, lines
    assert line.startswith(str(file))
    assert problem in line
    assert mend in line
    assert all(line.startswith(str(file)) for line in lines)


def test_a_layout_that_shares_gpus_is_claimed_to_win_only_within_its_budget(tmp_path: Path) -> None:
    test = {"metric": "itl_ms", "relation": "lower", "workload": "long", "layout": "one", "reference": "tp"}
    config = changed("layouts/one", one_gpu("time-sliced", "time-sliced"))
    config |= {"claims": {"it": {"says": "it is so", "tests": [test]}}}
    with pytest.raises(UserError) as caught:
        load_experiment(config)
    assert "claims.it.tests" in str(caught.value)
    assert "'one' and 'tp' occupy different numbers of GPUs" in str(caught.value)
    assert "only within its budget" in str(caught.value)
    config["layouts"]["tp"] = {"kind": "aggregated", "gpus": [0]}
    load_experiment(config)


def test_the_good_config_is_good() -> None:
    experiment = load_experiment(GOOD)
    assert [engine.devices for engine in experiment.layouts["pd"].engines()] == [[0], [1]]
    assert experiment.layouts["tp"].engines()[0].tensor_parallel == 4


def test_line_number_points_at_the_key(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    text = yaml.safe_dump(GOOD, sort_keys=False).replace("cores:\n    - 0\n    - 1", "coress: [0, 1]")
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_experiment(file)
    number = next(index for index, line in enumerate(text.splitlines(), 1) if "coress" in line)
    assert f"{file}:{number}: layouts.agg.coress" in str(caught.value)


def test_several_mistakes_give_several_lines() -> None:
    config = changed("layouts/agg/coress", [1]) | {"seed": -1}
    with pytest.raises(UserError) as caught:
        load_experiment(config)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "not valid YAML"),
        ("- a\n- b\n", "a mapping of keys, found list"),
        ("", "a mapping of keys, found NoneType"),
        ("a: b: c", "not valid YAML"),
    ],
)
def test_not_a_config_at_all(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words) as caught:
        read_yaml(file)
    assert str(caught.value).startswith(str(file))
    assert len(str(caught.value).splitlines()) == 1


def test_missing_file() -> None:
    with pytest.raises(UserError, match=r"^nowhere\.yaml: no such file; check the path$"):
        read_yaml(Path("nowhere.yaml"))
