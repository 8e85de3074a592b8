# SPDX-License-Identifier: Apache-2.0
"""Probes of the serving environment: its packages, the UCX and NIXL inside its wheels, torch's ABI."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from splitbench.environment.probes.base import (
    AbsentError,
    Command,
    Facts,
    NotUnderstoodError,
    Probe,
)

PROGRAM = Path(__file__).parent.parent / "serving_software.py"


@dataclass(frozen=True)
class ServingProgram:
    """`serving_software.py MODE`, run by the serving environment's interpreter."""

    python: Path
    mode: str

    def read(self, limit_s: float) -> str:
        if not self.python.exists():
            raise AbsentError
        # UCX prints its settings and NIXL its plugins when asked to; neither belongs into the answer.
        quiet = {"UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}
        return Command((str(self.python), "-I", str(PROGRAM), self.mode), env=quiet).read(limit_s)

    def __str__(self) -> str:
        return f"serving python: {PROGRAM.name} {self.mode}"


def _object(text: str) -> Facts:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise NotUnderstoodError("not JSON") from None
    if not isinstance(value, dict):
        raise NotUnderstoodError("not a JSON object")
    return value


def parse_packages(text: str) -> Facts:
    """Distributions with versions, requirements and commits."""
    value = _object(text)
    if not isinstance(value.get("packages"), dict):
        raise NotUnderstoodError("no packages in it")
    return value


def parse_ucx(text: str) -> Facts:
    """UCX libraries inside wheels."""
    value = _object(text)
    return {"ucx": value["ucx"], "ucx_system_library": value["system_library"]}


def parse_nixl(text: str) -> Facts:
    """NIXL's plugins; absent where NIXL is not installed."""
    value = _object(text)
    if value.get("module") is None and value.get("why") == "not installed":
        raise AbsentError
    return {"nixl": value}


def parse_abi(text: str) -> Facts:
    """Symbols that extensions lack."""
    return {"missing_symbols": _object(text)["missing_symbols"]}


def probes(python: Path) -> tuple[Probe, ...]:
    """The probes of one serving environment."""
    parsers: dict[str, tuple[Callable[[str], Facts], float]] = {
        "packages": (parse_packages, 8.0),
        "ucx": (parse_ucx, 8.0),
        "nixl": (parse_nixl, 8.0),
        "abi": (parse_abi, 8.0),
    }
    return tuple(
        Probe(f"serving-{mode}", ServingProgram(python, mode), parse, limit_s)
        for mode, (parse, limit_s) in parsers.items()
    )
