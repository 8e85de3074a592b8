# SPDX-License-Identifier: Apache-2.0
"""What every key of an experiment means, from the models' own schema: for `config explain` and the reference page."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from splitbench.errors import UserError
from splitbench.experiment.models import NAME_PATTERN, Experiment

Schema = Mapping[str, Any]

# What a change of a key runs again. The first pattern that matches the key, or a parent of it, holds.
RERUNS: tuple[tuple[str, str], ...] = (
    (r"experiment", "everything, in a folder of its own; the results of the old name stay"),
    (r"title|language", "the report"),
    (r"seed", "every cell"),
    (r"node\.selftest_streams", "the client's self-test, the checks and what rests on them; no cell"),
    (r".*\.startup_limit_s|.*\.port|node", "nothing that was measured"),
    (r"check|stack\.expects", "the check of the machine; no cell"),
    (r"stack\.(python|torch_cpu_index)", "nothing that was measured"),
    (r"stack|model|engine", "every cell"),
    (r"layouts", "the cells of that layout, and what is drawn from them"),
    (r"workloads", "the cells of that workload, and what is drawn from them"),
    (r"matrix\.order|rates", "nothing that was measured"),
    (r"matrix", "the cells that are new, and what is drawn from all of them"),
    (r"thresholds", "the checks, tables, statistics, figures and the report; no cell"),
    (r"on_invalid", "nothing by itself; with `rerun` the cells that a check refused"),
    (r"slo", "the statistics, the figures of goodput and cost, and the report; no cell"),
    (r"margin_percent", "the statistics, the figure of break-even, and the report; no cell"),
    (r"price", "the figure of cost and the report; no cell"),
    (r"claims", "the statistics and the report; no cell"),
    (r"figures", "that figure and the report; no cell"),
)
UNSAID = "not said"


@dataclass(frozen=True)
class Key:
    """One key of the config.

    Args:
        path: dotted, with `NAME` where the user names things and `[]` for the items of a list.
        kind: the kind of layout that has the key; None: all, or it is no layout's.
        meaning: one sentence without a full stop at its end.
        type: what may stand there, in words.
        default: as YAML writes it; None: it must be given.
        section: whether further keys stand below it.
    """

    path: str
    kind: str | None
    meaning: str
    type: str
    default: str | None
    section: bool

    @property
    def reruns(self) -> str:
        """What a change runs again; a test sees to it that it is said for every key."""
        for pattern, text in RERUNS:
            if re.match(rf"(?:{pattern})(?:$|[.\[])", self.path):
                return text
        return UNSAID


@cache
def all_keys() -> tuple[Key, ...]:
    """Every key, parents before children, in the models' order."""
    schema = Experiment.model_json_schema()
    return tuple(_keys(schema, "", None, schema["$defs"]))


def _keys(section: Schema, path: str, kind: str | None, models: Schema) -> Iterator[Key]:
    required = section.get("required", ())
    for name, field in section["properties"].items():
        here = f"{path}.{name}" if path else name
        place, inside = _inside(field, here, models)
        meaning = field.get("description") or (inside[0][1].get("description") if inside else None) or ""
        meaning, _, described = " ".join(meaning.split()).removesuffix(".").partition("; default: ")
        default = None if name in required else _default(field)
        yield Key(
            path=here,
            kind=kind,
            meaning=meaning,
            type=type_text(field, models),
            # A default that depends on other keys is a null in the schema and words in the description.
            default=described if described and default in ("none", "empty") else default,
            section=bool(inside),
        )
        for found, model in inside:
            yield from _keys(model, place, found or kind, models)


def _inside(field: Schema, path: str, models: Schema) -> tuple[str, list[tuple[str | None, Schema]]]:
    """Where the keys below a key stand, and the models they belong to, each with its kind of layout if it has one."""
    field = _not_null(field)
    if "$ref" in field:
        model = _model(field, models)
        return path, [(None, model)] if "properties" in model else []
    if field.get("type") == "array" and isinstance(field.get("items"), Mapping):
        return _inside(field["items"], f"{path}[]", models)
    if "oneOf" in field:
        kinds = field["discriminator"]["mapping"]
        return path, [(kind, models[reference.rpartition("/")[2]]) for kind, reference in kinds.items()]
    for value in (*field.get("patternProperties", {}).values(), field.get("additionalProperties")):
        if isinstance(value, Mapping) and ("$ref" in value or "oneOf" in value):
            return _inside(value, f"{path}.NAME", models)
    return path, []


def _not_null(field: Schema) -> Schema:
    """Of several choices the only one that isn't null, or the only one that has keys of its own."""
    choices = [choice for choice in field.get("anyOf", ()) if choice.get("type") != "null"]
    with_keys = [choice for choice in choices if "$ref" in choice]
    only = choices if len(choices) == 1 else with_keys
    return only[0] if len(only) == 1 else field


def _model(field: Schema, models: Schema) -> Schema:
    return dict(models[field["$ref"].rpartition("/")[2]])


def _default(field: Schema) -> str:
    if "default" not in field:
        return "as its own keys say" if "$ref" in field else "empty"
    value = field["default"]
    if value is None or value == "":
        return "none"
    if isinstance(value, Mapping):
        return "as its own keys say"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def type_text(field: Schema, models: Schema) -> str:
    """What may stand there, in words."""
    choices = [choice for choice in field.get("anyOf", ()) if choice.get("type") != "null"]
    if len(choices) > 3:
        return "any value"
    if choices:
        return " or ".join(dict.fromkeys(type_text(choice, models) for choice in choices))
    if "$ref" in field:
        model = _model(field, models)
        return "section" if "properties" in model else type_text(model, models)
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return "one of " + ", ".join(f"`{value}`" for value in field["enum"])
    kind = field.get("type")
    if kind == "array":
        item = type_text(field["items"], models) if "items" in field else "values"
        return f"list of {_plural(item)}{_at_least(field.get('minItems'))}"
    if "oneOf" in field:
        return "section by `kind`"
    if kind == "object":
        return _mapping_text(field, models)
    if kind in ("integer", "number"):
        return f"{'whole number' if kind == 'integer' else 'number'}{_range(field)}"
    if kind == "string":
        if field.get("pattern") == NAME_PATTERN:
            return "name"
        return "path" if field.get("format") == "path" else "text"
    return {"boolean": "true or false"}.get(str(kind), "any value")


def _mapping_text(field: Schema, models: Schema) -> str:
    values = [*field.get("patternProperties", {}).values(), field.get("additionalProperties")]
    value = next((value for value in values if isinstance(value, Mapping)), None)
    if value is None:
        return "mapping"
    names = field.get("propertyNames", {}).get("enum")
    keys = "these names" if names else "names"
    listed = f" ({', '.join(f'`{name}`' for name in names)})" if names else ""
    return f"mapping of {keys} to {_plural(type_text(value, models))}{listed}{_at_least(field.get('minProperties'))}"


def _plural(item: str) -> str:
    if item.startswith(("whole number", "number")):
        return item.replace("number", "numbers", 1)
    plurals = {
        "name": "names",
        "text": "texts",
        "section": "sections",
        "path": "paths",
        "any value": "values",
    }
    return plurals.get(item, item)


def _at_least(least: int | None) -> str:
    return f", at least {least}" if least else ""


def _range(field: Schema) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    above, below = field.get("exclusiveMinimum"), field.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    texts = [
        text.format(value)
        for text, value in (
            ("at least {:,}", low),
            ("above {:,}", above),
            ("at most {:,}", high),
            ("below {:,}", below),
        )
        if value is not None
    ]
    return f" {' and '.join(texts)}" if texts else ""


def find_keys(asked: str) -> list[Key]:
    """The keys that a person means: `layouts.agg-tp4.gpus`, `layouts.NAME.gpus` and `node.base_port` all work.

    Of a name that the person gave (`layouts.agg-tp4`), the keys that may stand below it.

    Raises:
        UserError: there is no such key.
    """
    parts = re.sub(r"\[\w*\]", "", asked).strip(".").split(".")
    found = [key for key in all_keys() if _matches(key, parts)]
    found = found or [key for key in all_keys() if _matches(key, [*parts, key.path.rpartition(".")[2]])]
    if found:
        return found
    known = list(dict.fromkeys(key.path for key in all_keys()))
    # The last word alone: people remember `base_port` better than where it stands.
    same = [path for path in known if path.rpartition(".")[2] == parts[-1]]
    near = same or difflib.get_close_matches(asked, known, n=3)
    mend = (
        f"did you mean {' or '.join(near[:4])}?" if near else "splitbench config explain lists the sections"
    )
    raise UserError(f"no key '{asked}' in an experiment", mend=mend)


def _matches(key: Key, parts: list[str]) -> bool:
    own = key.path.replace("[]", "").split(".")
    return len(own) == len(parts) and all(a in ("NAME", b) for a, b in zip(own, parts, strict=True))


def children(key: Key) -> list[Key]:
    """The keys right below a section."""
    return [
        other
        for other in all_keys()
        if re.fullmatch(rf"{re.escape(key.path)}(\[\])?(\.NAME)?\.[^.]+", other.path)
        and (key.kind is None or other.kind == key.kind)
    ]


def top_keys() -> list[Key]:
    """The sections, and what stands beside them."""
    return [key for key in all_keys() if "." not in key.path]


def explain(asked: str | None) -> str:
    """Text about a key, or about the top of an experiment.

    Raises:
        UserError: there is no such key.
    """
    if not asked:
        return "An experiment has these keys; name one to read more.\n\n" + _listing(top_keys())
    found = find_keys(asked)
    if found[0].path.count(".") > re.sub(r"\[\w*\]", "", asked).strip(".").count("."):
        return f"{asked} is a name that you give; below it may stand\n\n{_listing(found)}"
    return "\n".join(_one(key) for key in found)


def _one(key: Key) -> str:
    of = f"   (layouts of kind {key.kind})" if key.kind else ""
    lines = [f"{key.path}{of}", f"  {key.meaning}", ""]
    lines += [f"  type     {key.type.replace('`', '')}"]
    lines += [f"  default  {key.default or 'none, it must be given'}", f"  reruns   {key.reruns}"]
    below = children(key)
    if below:
        lines += ["", *(f"  {line}" for line in _listing(below).splitlines())]
    return "\n".join(lines) + "\n"


def _listing(keys: list[Key]) -> str:
    kinds: dict[tuple[str, str], list[str]] = {}
    for key in keys:
        kinds.setdefault((key.path, key.meaning), []).extend([key.kind] if key.kind else [])
    width = max(len(path) for path, _ in kinds)
    lines = []
    for (path, meaning), of in kinds.items():
        mark = f" ({', '.join(dict.fromkeys(of))})" if of else ""
        lines.append(f"{path:{width}}  {meaning}{mark}")
    return "\n".join(lines) + "\n"
