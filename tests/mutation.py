# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: change one thing in a module, run its tests, and see whether they notice.

    python -m tests.mutation statistics --sample 150 --seed 1

Mutants are drawn by seed from all places that can be changed. Each runs in a fork whose functions get the changed code
(what is no function is imported anew), so nothing on disk is touched and imports are paid once. The tests that are most
likely to notice go first, all others of the group follow where these did not.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import random
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
THIRD_PARTY = (
    "numpy",
    "scipy.stats",
    "pandas",
    "pyarrow.parquet",
    "pydantic",
    "hypothesis",
    "pytest",
    "yaml",
)


@dataclass(frozen=True)
class Group:
    """Modules that are changed, each with the tests that notice most of it, and all tests that should notice."""

    modules: dict[str, tuple[str, ...]]
    tests: tuple[str, ...]


def _tests(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/{folder}/test_{name}.py" for name in names)


_JUDGING = _tests("statistics", "kept_numbers", "claims", "verdict")
_SAMPLING = _tests("statistics", "kept_numbers", "clusters", "verdict")
_CHECKING = _tests("measuring", "kept_checks", "checks", "conditions", "logs", "recorded")
GROUPS = {
    "statistics": Group(
        {
            "splitbench.statistics.bootstrap": _SAMPLING,
            "splitbench.statistics.capacity": _tests("statistics", "kept_numbers", "slo_and_cost"),
            "splitbench.statistics.claims": _JUDGING,
            "splitbench.statistics.clusters": _SAMPLING,
            "splitbench.statistics.compare": _JUDGING,
            "splitbench.statistics.pools": _JUDGING,
            "splitbench.statistics.quantiles": _tests("statistics", "kept_numbers", "quantiles"),
            "splitbench.statistics.relations": _JUDGING,
            "splitbench.statistics.slo": _tests("statistics", "kept_numbers", "slo_and_cost"),
            "splitbench.statistics.stage": ("tests/unit/test_figures_measured.py",),
            "splitbench.statistics.steps": _JUDGING,
            "splitbench.statistics.variance": _SAMPLING,
            "splitbench.statistics.verdict": _tests("statistics", "kept_numbers", "verdict"),
        },
        ("tests/unit/statistics",),
    ),
    "checks": Group(
        {
            f"splitbench.measuring.{name}": _CHECKING
            for name in ("checks", "conditions", "evidence", "logs", "metrics", "symmetry", "transfer")
        },
        ("tests/unit/measuring",),
    ),
    "digests": Group(
        {
            "splitbench.files": _tests("experiment", "digests", "cells"),
            "splitbench.experiment.cells": _tests("experiment", "digests", "cells", "workloads"),
        },
        ("tests/unit/experiment",),
    ),
}

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor", "floor": "ceil"}
Change = Callable[[Any], None]


def changes_of(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """What can be changed at one node: a description, and a function that does it in place."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for other in _COMPARED[type(operator)]:
                name = f"{type(operator).__name__} -> {other.__name__}"
                yield name, lambda n, i=index, o=other: n.ops.__setitem__(i, o())
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _CALCULATED:
        other_op = _CALCULATED[type(node.op)]
        name = f"{type(node.op).__name__} -> {other_op.__name__}"
        yield name, lambda n, o=other_op: setattr(n, "op", o())
    elif isinstance(node, ast.BoolOp):
        other_bool = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"to {other_bool.__name__}", lambda n, o=other_bool: setattr(n, "op", o())
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition turned round", _negate
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield "filter dropped", lambda n: n.ifs.clear()
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node.value)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "returns None", lambda n: setattr(n, "value", ast.Constant(None))
    elif isinstance(node, ast.Name | ast.Attribute):
        field = "id" if isinstance(node, ast.Name) else "attr"
        if (found := getattr(node, field)) in _OTHER_NAME:
            yield f"{found} -> {_OTHER_NAME[found]}", lambda n: setattr(n, field, _OTHER_NAME[found])
    elif isinstance(node, ast.Break | ast.Continue):
        yield "statement dropped", lambda n: None


def _negate(node: Any) -> None:
    node.test = ast.UnaryOp(ast.Not(), node.test)


def _other_constants(value: Any) -> Iterator[tuple[str, Change]]:
    if isinstance(value, bool):
        yield f"{value} -> {not value}", lambda n: setattr(n, "value", not value)
    elif isinstance(value, int | float):
        other = value + 1
        yield f"{value} -> {other}", lambda n: setattr(n, "value", other)
    elif isinstance(value, str) and value:
        yield f"{value[:30]!r} changed", lambda n: setattr(n, "value", f"XX{value}")


class _Place(ast.NodeVisitor):
    """Numbers the nodes that may be changed, in a fixed order."""

    def __init__(self) -> None:
        self.nodes: list[ast.AST] = []

    def visit(self, node: ast.AST) -> None:
        # Annotations have no effect, messages of exceptions are prose, and parts of f-strings are mostly that.
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        self.nodes.append(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            if isinstance(node, ast.AnnAssign) and name == "target":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)


def _nodes(tree: ast.Module) -> list[ast.AST]:
    place = _Place()
    for statement in tree.body:
        # `if TYPE_CHECKING` and aliases of types at the top say nothing at run time.
        if isinstance(statement, ast.If):
            continue
        place.visit(statement)
    return place.nodes


@dataclass(frozen=True)
class Mutant:
    """One change to one module."""

    module: str
    node: int
    which: int
    line: int
    says: str

    @property
    def path(self) -> Path:
        return path_of(self.module)

    def tree(self) -> ast.Module:
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        node = _nodes(tree)[self.node]
        changes = list(changes_of(node))
        if isinstance(node, ast.Break | ast.Continue):
            return ast.fix_missing_locations(_Dropped(node).visit(tree))
        changes[self.which][1](node)
        return ast.fix_missing_locations(tree)

    def __str__(self) -> str:
        line = self.path.read_text(encoding="utf-8").splitlines()[self.line - 1].strip()
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.says}: {line}"


class _Dropped(ast.NodeTransformer):
    def __init__(self, gone: ast.AST) -> None:
        self.gone = gone

    def visit(self, node: ast.AST) -> Any:
        return ast.Pass() if node is self.gone else super().visit(node)


def path_of(module: str) -> Path:
    return (ROOT / module.replace(".", "/")).with_suffix(".py")


def mutants_of(module: str) -> list[Mutant]:
    """Every mutant of a module."""
    found = []
    for number, node in enumerate(_nodes(ast.parse(path_of(module).read_text(encoding="utf-8")))):
        for which, (says, _) in enumerate(changes_of(node)):
            found.append(Mutant(module, number, which, getattr(node, "lineno", 1), says))
    return found


def drawn(group: Group, sample: int, seed: int) -> list[Mutant]:
    """A random sample of a group's mutants, in the order of the files."""
    everything = [mutant for module in group.modules for mutant in mutants_of(module)]
    chosen = random.Random(seed).sample(range(len(everything)), min(sample, len(everything)))
    return [everything[index] for index in sorted(chosen)]


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(mutant.path))
        self.mutant = mutant

    def get_code(self, fullname: str) -> Any:
        return compile(self.mutant.tree(), str(self.mutant.path), "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.mutant.path, loader=_Loader(self.mutant))


def _in_place(mutant: Mutant) -> bool:
    """Give the changed code to the function that it is in, where it is inside of one; whoever holds it has it then."""
    changed = compile(mutant.tree(), str(mutant.path), "exec")
    found = [code for code in _functions(changed) if code.co_firstlineno <= mutant.line <= _last_line(code)]
    if not found:
        return False
    # The outermost: what is nested in it comes with it.
    code = min(found, key=lambda one: one.co_firstlineno)
    module = sys.modules[mutant.module]
    for function in _functions_of(module):
        if function.__code__.co_qualname == code.co_qualname:
            function.__code__ = code
            return True
    return False


def _functions(code: types.CodeType) -> Iterator[types.CodeType]:
    """Functions and methods, but nothing that is nested in them; the body of a class is none."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_flags & inspect.CO_OPTIMIZED:
                if not constant.co_name.startswith("<"):
                    yield constant
            else:
                yield from _functions(constant)


def _last_line(code: types.CodeType) -> int:
    lines = [line for _, _, line in code.co_lines() if line is not None]
    inner = [_last_line(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return max([*lines, *inner], default=code.co_firstlineno)


def _functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    for value in [*vars(module).values()]:
        for one in [value, *(vars(value).values() if isinstance(value, type) else ())]:
            one = getattr(one, "fget", None) or getattr(one, "func", None) or one
            one = (
                inspect.unwrap(getattr(one, "__func__", one))
                if callable(one) or hasattr(one, "__func__")
                else one
            )
            if isinstance(one, types.FunctionType) and one.__module__ == module.__name__:
                yield one


def _mutate(mutant: Mutant) -> None:
    lines = mutant.path.read_text(encoding="utf-8").splitlines()
    signature = lines[mutant.line - 1].lstrip().startswith(("def ", "async def ", "@"))
    if signature or not _in_place(mutant):
        sys.meta_path.insert(0, _Finder(mutant))
        for name in [name for name in sys.modules if name.partition(".")[0] == "splitbench"]:
            del sys.modules[name]


def _run_tests(mutant: Mutant | None, tests: Sequence[str], log: Path) -> int:
    """In a fork: bring in the changed code and run its tests up to the first that fails."""
    handle = log.open("w")
    os.dup2(handle.fileno(), 1)
    os.dup2(handle.fileno(), 2)
    if mutant is not None:
        _mutate(mutant)
    hypothesis.settings.register_profile("mutation", database=None, max_examples=15, deadline=None)
    hypothesis.settings.load_profile("mutation")
    hypothesis.settings.load_profile = lambda name: None  # type: ignore[method-assign,assignment]
    quiet = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:logging", "--tb=line", "--hypothesis-seed=0"]
    there = [name for name in tests if Path(name).exists()]
    return int(pytest.main([*quiet, *there]))


def outcome(mutant: Mutant | None, tests: Sequence[str], limit_s: float, log: Path) -> tuple[str, float]:
    """`killed`, `survived` or `timeout`, and the seconds that took."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            code = _run_tests(mutant, tests, log)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    while time.monotonic() - started < limit_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return ("survived" if code == 0 else "killed"), time.monotonic() - started
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout", time.monotonic() - started


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--sample", type=int, default=150, help="mutants to try")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--limit-s", type=float, default=90.0, help="after which a mutant counts as noticed")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further mutant is tried")
    parser.add_argument("--quick", action="store_true", help="only the first tests of each module, not all")
    parser.add_argument("--only", type=Path, help="JSON of an earlier run: try its survivors again")
    parser.add_argument("--out", type=Path, default=Path("/tmp/splitbench-mutation.json"))
    options = parser.parse_args(arguments)
    group = GROUPS[options.group]
    for name in THIRD_PARTY:
        importlib.import_module(name)
    if options.only is not None:
        old = json.loads(options.only.read_text())["mutants"]
        chosen = [Mutant(**m["mutant"]) for m in old if m["outcome"] == "survived"]
    else:
        chosen = drawn(group, options.sample, options.seed)
    # In the order of drawing, so that a run that is cut short is a random sample too.
    random.Random(options.seed).shuffle(chosen)
    log = options.out.with_suffix(".log")
    for name in group.modules:
        importlib.import_module(name)
    quickest = tuple(dict.fromkeys(name for names in group.modules.values() for name in names))
    sound, seconds = outcome(None, quickest, 600, log)
    if sound != "survived":
        print(f"the tests fail without any change; see {log}")
        return 1
    print(f"{len(chosen)} mutants; the tests take {seconds:.1f} s")
    results: list[dict[str, Any]] = []
    until = time.monotonic() + 60 * options.minutes
    for mutant in chosen:
        if time.monotonic() > until:
            break
        found, took = outcome(mutant, group.tests, options.limit_s, log)
        results.append(
            {"mutant": copy.deepcopy(mutant.__dict__), "outcome": found, "seconds": round(took, 2)}
        )
        if found == "survived" and not options.quick:
            found, more = outcome(mutant, group.tests, options.limit_s, log)
            took += more
        results.append(
            {"mutant": copy.deepcopy(mutant.__dict__), "outcome": found, "seconds": round(took, 2)}
        )
        if found == "survived":
            print(f"survived {mutant}", flush=True)
        options.out.write_text(json.dumps({"seed": options.seed, "mutants": results}, indent=1))
    noticed = sum(one["outcome"] != "survived" for one in results)
    print(
        f"{options.group}: {noticed} of {len(results)} noticed ({100 * noticed / max(len(results), 1):.0f} %)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
