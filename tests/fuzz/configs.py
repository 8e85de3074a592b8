# SPDX-License-Identifier: Apache-2.0
"""Configs: drawn from the JSON Schema that editors use, then bent in one or two places, then as text."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from splitbench.experiment.load import read_experiment, read_yaml
from splitbench.workflow import REPOSITORY, Workflow
from tests.fakes.experiments import GOOD
from tests.fuzz.judging import answered

SCHEMA: dict[str, Any] = json.loads((REPOSITORY / "config" / "schema.json").read_text(encoding="utf-8"))
# Text that shells, YAML, paths, formats, HTML and terminals read in their own way.
NASTY = [
    *("", " ", "a b", "'", '"', "`id`", "$(touch x)", "${HOME}", "a;b", "a\nb", "a\r\nb", "a\0b", "\x1b[31m"),
    *(
        "../../etc/passwd",
        "/etc/passwd",
        "~",
        "-rf",
        "--port",
        "--",
        "{model}",
        "{",
        "%s",
        "<script>",
        "&amp;",
    ),
    *(
        "é",
        "語",
        "🙂",
        "\u202eabc",
        "\u2028",
        "null",
        "yes",
        "1e9",
        "0x10",
        "1_000",
        "2024-01-01",
        "$a^",
        "#x",
    ),
]
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from([2**31, 2**63, 10**30, -(10**30)]),
    st.floats(),
    st.sampled_from([1e-320, 1e300, 0.1, 99.99999999999999]),
    st.sampled_from(NASTY),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
    st.lists(st.sampled_from([0, 1, "a", None, 0.5]), max_size=3),
    st.dictionaries(st.sampled_from(["a", "kind", "--x", "a\nb"]), st.integers(0, 3), max_size=2),
    st.dates(),
)
NAMES = st.sampled_from(["a", "b1", "long", "agg", "pd-2", "A", "x" * 63])
PLAIN = st.sampled_from(["a", "b1", "text", "*"])


def strategy(node: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that fit a node of the schema, as far as a schema can say it."""
    if "$ref" in node:
        return strategy(SCHEMA["$defs"][node["$ref"].rpartition("/")[2]], depth)
    for key in ("anyOf", "oneOf"):
        if key in node:
            return st.one_of([strategy(one, depth + 1) for one in node[key]])
    if "allOf" in node:
        return strategy(node["allOf"][0], depth)
    if "const" in node:
        return st.just(node["const"])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    match node.get("type"):
        case "object":
            return _object(node, depth)
        case "array":
            return _array(node, depth)
        case "integer":
            low = node.get("minimum", node.get("exclusiveMinimum", -1) + 1)
            return st.integers(low, min(node.get("maximum", low + 40), low + 40))
        case "number":
            low = node.get("minimum", node.get("exclusiveMinimum", 0))
            high = node.get("maximum", node.get("exclusiveMaximum", low + 100))
            return st.floats(low, high, exclude_min=True, exclude_max=True)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "string":
            if "pattern" in node and "0-9a-f" in node["pattern"]:
                return st.just("0" * 64)
            return NAMES if "pattern" in node else PLAIN
    return st.none() | st.integers(0, 3) | PLAIN


def _object(node: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    if "properties" not in node:
        inner = node.get("additionalProperties", {})
        value = strategy(inner if isinstance(inner, dict) else {}, depth + 1)
        keys = PLAIN.filter(str.isalnum)
        if "propertyNames" in node:
            names = node["propertyNames"]
            keys = strategy(names, depth) if "$ref" in names or "enum" in names else NAMES
        return st.dictionaries(keys, value, min_size=node.get("minProperties", 0), max_size=2)
    required = node.get("required", [])
    parts = {name: strategy(one, depth + 1) for name, one in node["properties"].items()}
    return st.fixed_dictionaries(
        {name: parts[name] for name in required},
        optional={name: part for name, part in parts.items() if name not in required},
    )


def _array(node: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    if "prefixItems" in node:
        return st.tuples(*(strategy(one, depth + 1) for one in node["prefixItems"])).map(list)
    low = node.get("minItems", 0)
    return st.lists(strategy(node.get("items", {}), depth + 1), min_size=low, max_size=low + 2)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _places(item, (*at, key))
    return found


@st.composite
def bent(draw: st.DrawFn, configs: st.SearchStrategy[Any]) -> Any:
    """A config with junk in one to three places: a value replaced, a key renamed, added or removed."""
    config = copy.deepcopy(draw(configs))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(_places(config)))
        if not place:
            continue
        parent = config
        for key in place[:-1]:
            parent = parent[key]
        match draw(st.sampled_from(["value", "value", "value", "remove", "rename", "add"])):
            case "value":
                parent[place[-1]] = draw(JUNK)
            case "remove":
                del parent[place[-1]]
            case "rename" if isinstance(parent, dict):
                name = draw(st.sampled_from(NASTY) | st.integers(0, 3) | st.none())
                parent[name] = parent.pop(place[-1])
            case _ if isinstance(parent, dict):
                parent[draw(st.sampled_from([*NASTY, "args", "env", "gpus", "share"]))] = draw(JUNK)
            case _:
                parent.append(draw(JUNK))
    return config


FULL = GOOD | {
    "title": "t",
    "engine": {"args": {"max-num-seqs": 8}, "env": {"A": "1"}},
    "slo": {"itl_ms": 30, "percentile": 99},
    "price": {"per_accelerator_hour": 2.0, "currency": "USD"},
    "claims": {
        "one": {
            "says": "it is so",
            "tests": [
                {
                    "metric": "itl_ms",
                    "relation": "at_most",
                    "threshold": 30,
                    "workload": "long",
                    "layout": "agg",
                },
                {
                    "metric": "ttft_ms",
                    "relation": "lower",
                    "reference": "agg",
                    "workload": "long",
                    "layout": "pd",
                },
            ],
        }
    },
    "figures": {
        "itl_of_layouts": {
            "percentiles": [50],
            "window": {"x_max_ms": 9},
            "windows": {"long": {"y_min": 0.5}},
        },
        "cost": {"layouts": ["agg"], "concurrency": 2, "slo_ms": 3},
        "goodput": {},
    },
    "thresholds": {"load_percent": 90},
    "node": {"base_port": 20000, "telemetry": {"interval_s": 1}},
}
SHAPED = strategy(SCHEMA)


def used_whole(file: Path) -> None:
    """All that happens to a config before the first job: what `snakemake -n` and `config check` make of it."""
    read_experiment(file)
    flow = Workflow(read_yaml(file), [file], REPOSITORY, sources=False)
    for layout in flow.experiment.layouts:
        flow.plan_text(layout)
        flow.plan_script(layout)
    for name in flow.figure_names:
        flow.figure_text(name)
    for cell in flow.cells.ids[:50]:
        flow.cell_slice(cell)
        flow.cell_priority(cell)
    for section in ("stack", "model", "thresholds", "slo", "claims", "margin_percent"):
        flow.section(section)
    for text in (
        flow.check_text(),
        flow.asked_percentiles,
        flow.config_argument,
        flow.stack_key,
        flow.model_key,
    ):
        assert isinstance(text, str)


def _tried(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bad.yaml"
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        answered(lambda: used_whole(file))


@given(bent(st.just(FULL)))
def nearly_good(config: Any) -> None:
    """The good config with junk in it."""
    _tried(yaml.safe_dump(config, allow_unicode=True))


@given(SHAPED | bent(SHAPED))
def shaped(config: Any) -> None:
    """What the schema allows, with or without junk in it."""
    _tried(yaml.safe_dump(config, allow_unicode=True))


GOOD_TEXT = yaml.safe_dump(FULL)
YAML_BITS = [
    *(
        "&a ",
        "*a",
        "<<: *a\n",
        "!!python/object:os.system ",
        "!!int x",
        "!!binary x",
        "!!set {a}",
        "!!timestamp x",
    ),
    *(
        "2024-99-99",
        "0b_",
        "1:99:99",
        ".nan",
        "-.inf",
        "? ",
        "- ",
        ": ",
        "\t",
        "---\n",
        "...\n",
        "%YAML 9.9\n",
    ),
    *("[[[[[[", "{{{{{{", "'", '"', "\x00", "\x7f", "\ufeff", "\ud800", "|\n", ">\n", "#", '"\\ud800"', "= "),
]


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD_TEXT)), st.sampled_from(YAML_BITS)), min_size=1, max_size=3)
)
def as_text(bits: list[tuple[int, str]]) -> None:
    """The good file with pieces of YAML at random places."""
    text = GOOD_TEXT
    for at, bit in bits:
        text = text[:at] + bit + text[at:]
    _tried(text)


TARGETS = {"config-nearly-good": nearly_good, "config-shaped": shaped, "config-text": as_text}
