# SPDX-License-Identifier: Apache-2.0
"""A launch plan as a shell script that a person can read and run by hand, every flag and variable explained.

The supervisor does not run it; both come from the same plan. What differs between machines is a variable at its head.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set

import yaml

from splitbench.experiment.models import Experiment, PdLayout
from splitbench.serving import meanings
from splitbench.serving.plan import PLACEHOLDERS, EnginePlan, Plan, ProxyPlan
from splitbench.serving.waves import waves

_PLAIN = re.compile(r"[\w./@%+=:,-]*")
_MARK = re.compile("|".join(r"\{" + name + r"\}" for name in PLACEHOLDERS))


class UnexplainedError(LookupError):
    """The plan sets a flag, variable or key of its own for which `meanings` has no line."""


def quoted(text: str) -> str:
    """A word for the shell: literal text quoted, placeholders as quoted variables."""
    pieces, end = [], 0
    for match in _MARK.finditer(text):
        literal = text[end : match.start()]
        pieces.append(shlex.quote(literal) if literal else "")
        pieces.append(f'"${match[0][1:-1].upper()}"')
        end = match.end()
    rest = text[end:]
    pieces.append(shlex.quote(rest) if rest or not text else "")
    return "".join(pieces)


def script(experiment: Experiment, plan: Plan, places: Mapping[str, str]) -> str:
    """The script of one layout.

    Args:
        experiment: the config, which tells who set a flag.
        plan: the layout's plan.
        places: where `serving_python`, `workflow_python` and `model` are unless the environment says otherwise; "./"
            in front means the repository.

    Raises:
        UnexplainedError: something that the plan sets has no explanation.
    """
    layout = experiment.layouts[plan.layout]
    options = {*layout.connector_options, *layout.lmcache_options} if isinstance(layout, PdLayout) else set()
    parts: list[str] = [*_head(experiment, plan, places), *_files(plan, options)]
    names = []
    for service in plan.services:
        words = _words(service.argv, meanings.SERVICE_FLAGS, set(), service.name)
        parts += _command(service.name, service.env, words, set(), service.name)
    for engine, spec in zip(plan.engines, layout.engines(), strict=True):
        levels = (experiment.engine, layout, spec)
        given = {flag for level in levels for flag in level.args}
        words = _words(engine.argv, meanings.ENGINE_FLAGS, given | options, engine.name)
        variables = {variable for level in levels for variable in level.env}
        parts += _command(
            engine.name, engine.env, words, variables, _title(plan, engine), _pinned(plan, engine)
        )
        names.append(engine.name)
    if plan.proxy:
        words = _words(plan.proxy.argv, meanings.PROXY_FLAGS, set(), "proxy")
        parts += _command("proxy", plan.proxy.env, words, set(), "the front door")
    return "\n".join([*parts, *_run(plan)]) + "\n"


def _title(plan: Plan, engine: EnginePlan) -> str:
    unit = "core" if plan.budget.kind == "cores" else "GPU"
    where = f", node {engine.node}" if plan.nodes > 1 else ""
    return f"{engine.name}: {engine.role}{where}, {unit} {', '.join(map(str, engine.devices))}"


def _pinned(plan: Plan, engine: EnginePlan) -> list[str]:
    if plan.budget.kind != "cores" or engine.node:
        return []
    cores = ",".join(map(str, engine.devices))
    return ["  # confined to its cores, its API server included", f"  taskset -c {cores}"]


def _head(experiment: Experiment, plan: Plan, places: Mapping[str, str]) -> list[str]:
    front = f"http://{plan.front_host}:{plan.front_port}"
    share = f", shared ({plan.budget.share})" if plan.budget.share else ""

    def default(name: str) -> str:
        value, variable, folder = places[name], name.upper(), ""
        if value.startswith("./"):
            folder, value = "$REPOSITORY/", value[2:]
        if _PLAIN.fullmatch(value):
            return f'{variable}="${{{variable}:-{folder}{value}}}"'
        # A shell reads a default within quotes once more, so text that it could read another way stands apart.
        rest = f'"{folder}"{shlex.quote(value)}' if folder else shlex.quote(value)
        return f'{variable}="${{{variable}:-}}"; [ -n "${variable}" ] || {variable}={rest}'

    runtime = (
        ["# Sockets, so with a short path.", 'RUNTIME="${RUNTIME:-$(mktemp -d)}"'] if plan.services else []
    )
    return [
        "#!/usr/bin/env bash",
        f"# Layout {plan.layout} of experiment {experiment.experiment}: {plan.kind}, {plan.budget}{share}.",
        f"# Brings the layout up at {front}, as `splitbench up {plan.layout}` does, and ends it on Ctrl-C.",
        "set -euo pipefail",
        "",
        "# Places on this machine; set them in the environment where they are others.",
        'REPOSITORY="${REPOSITORY:-$PWD}"',
        default("serving_python"),
        default("workflow_python"),
        default("model"),
        *(
            f'NODE{number}="${{NODE{number}:?address of node {number} of the allocation}}"'
            for number in range(plan.nodes if plan.nodes > 1 else 0)
        ),
        "# Logs, and files that engines read.",
        'SESSION="${SESSION:-$(mktemp -d)}"',
        'mkdir -p "$SESSION"; SESSION="$(cd "$SESSION" && pwd)"',
        *runtime,
        "",
        "# What an engine does must follow from this script, not from the shell that happens to start it.",
        "for name in $(compgen -e); do",
        '  case "$name" in',
        '    VLLM_*|LMCACHE_*|UCX_*|NIXL_*|OMP_*|KMP_*|GOMP_*|PYTHONPATH|PYTHONHASHSEED) unset "$name" ;;',
        "  esac",
        "done",
        'PATH="$(dirname "$SERVING_PYTHON"):$PATH"',
        "",
    ]


def _files(plan: Plan, given: Set[str]) -> Iterator[str]:
    for name, text in sorted(plan.files.items()):
        yield f"# {name}"
        for key in yaml.safe_load(text):
            yield f"#   {key}: {_meaning(meanings.LMCACHE_FILE, key, name, given)}"
        open_ended = _MARK.search(text) is not None
        end = "END_OF_FILE"
        while end in text.splitlines():
            end += "_"
        quote = "" if open_ended else "'"
        yield f"cat > {quoted('{session}/' + name)} <<{quote}{end}{quote}"
        yield (_in_document(text) if open_ended else text).rstrip("\n")
        yield end
        yield ""


def _in_document(text: str) -> str:
    """Text for a here-document in which the shell fills in the placeholders, and nothing else."""
    plain = re.sub(r"([\\$`])", r"\\\1", text)
    return _MARK.sub(lambda match: f"${{{match[0][1:-1].upper()}}}", plain)


def _meaning(known: Mapping[str, str], name: str, where: str, given: Set[str] = frozenset()) -> str:
    if name not in known:
        if name in given:
            return "from the config"
        raise UnexplainedError(f"{where}: {name!r} has no line in splitbench/serving/meanings.py")
    return known[name]


def _words(argv: Sequence[str], known: Mapping[str, str], given: set[str], where: str) -> list[str]:
    """Lines of a bash array: a comment, then a flag with its values."""
    starts = [index for index, word in enumerate(argv) if index and _is_flag(argv, index)]
    lines = [f"  {' '.join(map(quoted, argv[: starts[0] if starts else len(argv)]))}"]
    for begin, end in zip(starts, [*starts[1:], len(argv)], strict=True):
        word = argv[begin]
        name = word.lstrip("-")
        positive = name.removeprefix("no-")
        set_by_config = name in given or positive in given
        if set_by_config:
            text = known.get(name) or known.get(positive)
            lines.append(f"  # {text} (from the config)" if text else "  # from the config")
        else:
            lines.append(f"  # {_meaning(known, name, where)}")
        if name == "kv-transfer-config":
            lines += [f"  #   {line}" for line in _transfer_keys(json.loads(argv[begin + 1]), where, given)]
        lines.append(f"  {' '.join(map(quoted, argv[begin:end]))}")
    return lines


def _is_flag(argv: Sequence[str], index: int) -> bool:
    word = argv[index]
    # "-m" and "-c" belong to the interpreter; what follows the module counts.
    return word.startswith("--") or (word in ("-f",) and argv[0] != "{serving_python}")


def _transfer_keys(value: Mapping[str, object], where: str, given: Set[str]) -> Iterator[str]:
    for key, item in sorted(value.items()):
        yield f"{key}: {_meaning(meanings.KV_TRANSFER, key, where, given)}"
        if isinstance(item, dict):
            # What lies inside an option of the config's is the config's, too.
            inside = given | item.keys() if key in given else given
            yield from (f"  {line}" for line in _transfer_keys(item, where, inside))


def _command(
    name: str,
    env: Mapping[str, str],
    words: list[str],
    given: set[str],
    title: str,
    prefix: Sequence[str] = (),
) -> Iterator[str]:
    yield f"# -- {title} --"
    yield f"{_variable(name)}=("
    yield "  env"
    for variable, value in sorted(env.items()):
        if variable in given:
            text = meanings.ENVIRONMENT.get(variable)
            yield f"  # {text} (from the config)" if text else "  # from the config"
        else:
            yield f"  # {_meaning(meanings.ENVIRONMENT, variable, name)}"
        yield f"  {variable}={quoted(value)}"
    yield from prefix
    yield from words
    yield ")"
    yield ""


def _variable(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _health(part: EnginePlan | ProxyPlan) -> str:
    return f"healthy {quoted(f'http://{part.host}:{part.port}/health')} {part.startup_limit_s:g}"


def _run(plan: Plan) -> Iterator[str]:
    yield from (
        "# -- run --",
        "pids=()",
        "stop() {",
        "  trap - EXIT INT TERM",
        "  # each has a process group of its own: nothing is left behind, and nobody else is hit",
        '  for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done',
        f'  for _ in $(seq {plan.shutdown_grace_s:g}); do [ -n "$(jobs -pr)" ] || break; sleep 1; done',
        '  for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done',
        "}",
        "trap stop EXIT INT TERM",
        "start() {  # NAME COMMAND...: in the session's folder, with a log of its own",
        '  local name="$1"; shift',
        '  (cd "$SESSION" && exec setsid "$@" > "$SESSION/$name.log" 2>&1 < /dev/null) &',
        '  pids+=("$!")',
        '  echo "$name: pid $!, log $SESSION/$name.log"',
        "}",
        "healthy() {  # URL SECONDS",
        '  for _ in $(seq "$2"); do',
        '    curl -sf -o /dev/null "$1" && return',
        '    [ "$(jobs -pr | wc -l)" -eq "${#pids[@]}" ] || { echo "a process has ended: $SESSION" >&2; exit 1; }',
        "    sleep 1",
        "  done",
        '  echo "$1 was not healthy within $2 s" >&2; exit 1',
        "}",
        "",
    )
    for service in plan.services:
        yield f'start {service.name} "${{{_variable(service.name)}[@]}}"'
        if service.health_port is not None:
            url = f"http://{service.host}:{service.health_port}{service.health_path}"
            yield f"healthy {url} {service.startup_limit_s:g}"
        if service.ready_file is not None:
            yield f"until [ -e {quoted(service.ready_file)} ]; do sleep 0.1; done"
    groups = waves([(engine.places, engine.argv) for engine in plan.engines])
    if len(groups) > 1:
        yield "# Engines on one GPU start one after the other: each measures the memory that is free."
    for group in groups:
        for index in group:
            name = plan.engines[index].name
            yield f'start {name} "${{{_variable(name)}[@]}}"'
        for index in group:
            yield _health(plan.engines[index])
    if plan.proxy:
        yield 'start proxy "${proxy[@]}"'
        yield _health(plan.proxy)
    yield ""
    body = json.dumps({"model": plan.served_model, "prompt": "Hello", "max_tokens": 8})
    url = f"http://{plan.front_host}:{plan.front_port}/v1/completions"
    yield "# A first completion through the front door."
    yield f"curl -sf {quoted(url)} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    yield f'echo; echo "up at http://{plan.front_host}:{plan.front_port}; Ctrl-C ends it"'
    yield "wait"
