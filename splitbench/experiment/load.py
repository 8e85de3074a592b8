# SPDX-License-Identifier: Apache-2.0
"""Read an experiment's config and say, one line a problem, what is wrong with it and how to mend it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from splitbench.errors import UserError
from splitbench.experiment.models import MEMORY_ARGS, EngineSpec, Experiment, Layout, MpsShare

Location = tuple[int | str, ...]

_KINDS = ("aggregated", "replicas", "pd")


def load_experiment(config: Mapping[str, Any], files: Sequence[Path] = ()) -> Experiment:
    """Check a config (as read from YAML, overrides merged in) and give it its types and defaults.

    Args:
        config: the whole config as plain data.
        files: the files that it was read from, the last one first asked for line numbers.

    Raises:
        UserError: one line for each problem: file, line, key, what is wrong, what to do.
    """
    try:
        experiment = Experiment.model_validate(dict(config))
    except ValidationError as error:
        lines = [_line(details, config, files) for details in error.errors()]
        raise ConfigError(lines) from None
    problems = [
        _problem(location, message, mend, files) for location, message, mend in cross_checks(experiment)
    ]
    if problems:
        raise ConfigError(problems)
    return experiment


def read_experiment(path: Path) -> Experiment:
    """Read an experiment from one YAML file.

    Raises:
        UserError: the file is missing, is not YAML or is not an experiment.
    """
    return load_experiment(read_yaml(path), [path])


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        UserError: the file is missing, unreadable, not YAML or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), mend="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path), mend="check the file") from None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = str(path) if mark is None else f"{path}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"not valid YAML ({problem})", where=where, mend="mend the syntax there") from None
    if not isinstance(value, dict):
        raise UserError(
            f"an experiment is a mapping of keys, found {type(value).__name__}",
            where=str(path),
            mend="start from config/config.yaml",
        )
    return value


class ConfigError(UserError):
    """Several problems at once, a line each."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__(errors[0].message, where=errors[0].where, mend=errors[0].mend)
        self.errors = tuple(errors)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


def cross_checks(experiment: Experiment) -> list[tuple[Location, str, str]]:
    """Rules between fields that a single field's type can't state: (location, what is wrong, mend)."""
    problems: list[tuple[Location, str, str]] = []
    for name, layout in experiment.layouts.items():
        users: dict[tuple[str, int], list[EngineSpec]] = {}
        units = set()
        for engine in layout.engines():
            unit = "core" if engine.cores is not None else "GPU"
            units.add(unit)
            for device in engine.devices:
                users.setdefault((unit, device), []).append(engine)
        above = {flag for level in (experiment.engine, layout) for flag in level.args}
        for (unit, device), engines in users.items():
            if len(engines) > 1 and (problem := sharing_problem(f"{unit} {device}", engines, above)):
                problems.append((("layouts", name), *problem))
        if len(units) > 1:
            problems.append(
                (("layouts", name), "some engines are on cores, some on GPUs", "use one kind in a layout")
            )
        ports = [engine.port for engine in layout.engines() if engine.port is not None]
        for port in sorted({port for port in ports if ports.count(port) > 1}):
            problems.append(
                (("layouts", name), f"port {port} is given to two engines", "give each engine its own port")
            )
    lowered: dict[str, str] = {}
    for section, names in (("layouts", experiment.layouts), ("workloads", experiment.workloads)):
        lowered.clear()
        for name in names:
            other = lowered.setdefault(name.lower(), name)
            if other != name:
                problems.append(
                    (
                        (section, name),
                        f"differs from '{other}' only by case, which some file systems don't keep apart",
                        "rename one",
                    )
                )
    problems += _claim_checks(experiment)
    longest = experiment.model.synthetic.max_model_len if experiment.model.synthetic is not None else None
    for name, workload in experiment.workloads.items():
        asked = math.ceil((workload.input_tokens + workload.output_tokens) * (1 + workload.range_ratio))
        if longest is not None and asked > longest:
            problems.append(
                (
                    ("workloads", name),
                    f"{asked} tokens in and out don't fit model.synthetic.max_model_len {longest}",
                    "raise that or shorten the workload",
                )
            )
    return problems


def sharing_problem(
    device: str, engines: Sequence[EngineSpec], flags_above: Collection[str]
) -> tuple[str, str] | None:
    """Why several engines can't share a device: (what is wrong, mend); None when they can.

    Args:
        device: its name, as in "GPU 0".
        engines: all that use it.
        flags_above: flags that the layout or the experiment sets for all engines.
    """
    percents = [engine.share.mps_percent for engine in engines if isinstance(engine.share, MpsShare)]
    sliced = sum(engine.share == "time-sliced" for engine in engines)
    if len(percents) + sliced < len(engines):
        both = "two" if len(engines) == 2 else str(len(engines))
        hint = " or, on GPUs, each a 'share'" if device.startswith("GPU") else ""
        return f"{device} is used by {both} engines", f"give each engine its own devices{hint}"
    if percents and sliced:
        return f"{device} is shared in two ways", "give its engines the same kind of 'share'"
    if sum(percents) > 100:
        shares = " + ".join(map(str, percents))
        return f"the shares of {device} are {shares} = {sum(percents)} %", "let them sum to at most 100"
    if not set(MEMORY_ARGS) & set(flags_above) and not all(engine.states_memory for engine in engines):
        return (
            f"engines share {device}, but not all say how much of its memory they take",
            "set memory_share or kv_cache_bytes on each",
        )
    memory = sum(engine.memory_share or 0.0 for engine in engines)
    if memory > 1:
        return f"the memory shares of {device} sum to {memory:g}", "let them sum to less than 1"
    return None


def _claim_checks(experiment: Experiment) -> list[tuple[Location, str, str]]:
    """Claims may only name what the experiment has: a misspelt one would never be judged."""
    problems: list[tuple[Location, str, str]] = []
    for name, claim in experiment.claims.items():
        for index, test in enumerate(claim.tests):
            place: Location = ("claims", name, "tests", index)
            for key, known in (("layout", experiment.layouts), ("reference", experiment.layouts)):
                given = getattr(test, key)
                if given is not None and given not in known:
                    problems.append(
                        ((*place, key), f"no layout '{given}'", f"use one of: {', '.join(known)}")
                    )
            arms = [experiment.layouts[n] for n in (test.layout, test.reference) if n in experiment.layouts]
            shared = any(engine.share is not None for arm in arms for engine in arm.engines())
            if shared and len({len({d for e in arm.engines() for d in e.devices}) for arm in arms}) > 1:
                problems.append(
                    (
                        (*place, "reference"),
                        f"'{test.layout}' and '{test.reference}' occupy different numbers of GPUs, "
                        "and engines of one share them",
                        "compare a layout whose engines share GPUs only within its budget",
                    )
                )
            for key in ("workload", "other_workload"):
                given = getattr(test, key)
                if given is not None and given not in experiment.workloads:
                    mend = f"use one of: {', '.join(experiment.workloads)}"
                    problems.append(((*place, key), f"no workload '{given}'", mend))
            workload = experiment.workloads.get(test.workload)
            own = workload.concurrency if workload is not None else None
            unknown = [c for c in test.concurrency if c not in (own or experiment.matrix.concurrency)]
            if unknown:
                mend = "add it to matrix.concurrency or take it out here"
                problems.append(((*place, "concurrency"), f"no cell has concurrency {unknown[0]}", mend))
    return problems


def check_sources(experiment: Experiment, root: Path) -> None:
    """Make sure that the files an experiment names are there, before anything starts.

    The serving environment's interpreter is not looked for: plans are made without it, and it is the first thing that
    a run asks.

    Raises:
        UserError: the stack's lock or the model's folder is missing.
    """
    stack, model = experiment.stack, experiment.model
    missing = [
        (key, path)
        for key, path in (
            ("stack.lock", stack.lock),
            ("stack.expects", stack.expects),
            ("model.path", model.path),
        )
        if path is not None and not (root / path).exists()
    ]
    if missing:
        raise ConfigError(
            [UserError(f"{path} does not exist", where=key, mend="check the path") for key, path in missing]
        )


def _line(details: ErrorDetails, config: Mapping[str, Any], files: Sequence[Path]) -> UserError:
    location = _config_location(details["loc"])
    kind, context = details["type"], details.get("ctx", {})
    given = details.get("input")
    if kind == "extra_forbidden":
        allowed = _fields_at(location[:-1], config)
        near = difflib.get_close_matches(str(location[-1]), allowed, n=1)
        message = "unknown key"
        mend = f"did you mean '{near[0]}'?" if near else f"use one of: {', '.join(allowed)}"
    elif kind == "missing":
        message, mend = "is missing", "add it"
    elif kind == "union_tag_not_found":
        message, mend = "'kind' is missing", f"add 'kind' with one of: {', '.join(_KINDS)}"
        location = (*location, "kind")
    elif kind == "union_tag_invalid":
        message = f"unknown kind '{context.get('tag')}'"
        mend = f"use one of: {', '.join(_KINDS)}"
        location = (*location, "kind")
    elif kind == "value_error":
        message, _, mend = str(context["error"]).partition("; ")
    elif kind == "string_pattern_mismatch":
        message = f"'{given}' can't be a name in paths"
        mend = "use letters, digits and + . _ -, starting with a letter or digit, at most 63"
    elif kind in ("too_short", "too_long"):
        message = details["msg"].lower().replace("after validation, ", "").split(", not")[0]
        mend = "an empty matrix measures nothing; name at least one" if not given else "name more"
    else:
        message = f"{details['msg'][0].lower()}{details['msg'][1:]}"
        if not isinstance(given, dict | list):
            message += f" (found {given!r})"
        mend = "change the value"
    return _problem(location, message, mend, files)


def _config_location(raw: Location) -> Location:
    """Pydantic's location without what is not in the file: union tags and marks of dictionary keys."""
    location = [part for part in raw if part != "[key]"]
    if location[0] == "layouts" and len(location) > 2 and location[2] in _KINDS:
        del location[2]
    return tuple(location)


def _fields_at(location: Location, config: Mapping[str, Any]) -> list[str]:
    """Keys that the config may have at a place."""
    model: Any = Experiment
    for depth, part in enumerate(location):
        if location[0] == "layouts" and depth == 1:
            kind = dict(config).get("layouts", {}).get(part, {}).get("kind", "aggregated")
            model = dict(zip(_KINDS, get_args(get_args(Layout)[0]), strict=True))[kind]
            continue
        if isinstance(part, int) or not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue
        field = model.model_fields.get(str(part))
        model = _model_in(field.annotation) if field is not None else None
    if isinstance(model, type) and issubclass(model, BaseModel):
        return list(model.model_fields)
    return []


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None


def _problem(location: Location, message: str, mend: str, files: Sequence[Path]) -> UserError:
    key = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" if i else str(part)
        for i, part in enumerate(location)
    )
    for path in reversed(files):
        line = line_of(path, location)
        if line is not None:
            return UserError(message, where=f"{path}:{line}: {key}", mend=mend)
    return UserError(message, where=f"{files[-1] if files else 'config'}: {key}", mend=mend)


def line_of(path: Path, location: Location) -> int | None:
    """Line (from 1) where a key stands in a YAML file, or its nearest parent that is there; None if neither."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    line: int | None = None
    for part in location:
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == str(part)), None)
            if pair is None:
                return line
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            return line
    return line
