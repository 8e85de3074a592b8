# SPDX-License-Identifier: Apache-2.0
"""Stack files: what an experiment expects of the machine and its software, and how strictly.

An entry names a fact and one policy: `exact` (that version), `minimum` (that version or number, or more), `range`
(clauses such as `>=580.95.05,<581`), or `record` (write it down, expect nothing).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from splitbench.environment import versions
from splitbench.environment.rules import Facts
from splitbench.errors import UserError
from splitbench.experiment.load import read_yaml

GIB = 2**30
Value = str | int | float | None
Policy = Literal["exact", "minimum", "range", "record"]
Verdict = Literal["ok", "mismatch", "missing", "recorded"]


class Entry(BaseModel):
    """One line of a stack file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    exact: str | None = Field(None, description="this version; a distribution's suffix counts only if stated")
    minimum: str | None = Field(None, description="this version or number, or more")
    range: str | None = Field(None, description="clauses with >=, <=, >, <, ==, !=, separated by commas")
    record: bool = Field(False, description="expect nothing, only write down what is there")
    reference: str | None = Field(None, description="what the source of the experiment had; decides nothing")
    mend: str | None = Field(None, description="what to do about a mismatch")

    @field_validator("exact", "minimum", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        # YAML reads 8 and 13.0 as numbers.
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        given = [self.exact is not None, self.minimum is not None, self.range is not None, self.record]
        if sum(given) != 1:
            raise ValueError("give exactly one of 'exact', 'minimum', 'range' and 'record: true'")
        if self.range is not None and not versions.valid_range(self.range):
            raise ValueError(f"'{self.range}' can't be read; write it like '>=0.10.2,<=0.16.0'")
        if self.minimum is not None and versions.key(self.minimum) is None:
            raise ValueError(f"'{self.minimum}' is neither a version nor a number; use 'exact' for a text")
        return self

    @property
    def policy(self) -> Policy:
        """Which of the four it is."""
        if self.record:
            return "record"
        return "exact" if self.exact is not None else "minimum" if self.minimum is not None else "range"

    @property
    def expected(self) -> str:
        """The expectation in words."""
        if self.record:
            return self.reference or ""
        return self.exact or (f">= {self.minimum}" if self.minimum is not None else self.range or "")


class StackFile(BaseModel):
    """A stack file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str = Field("", description="where these versions are from")
    expects: dict[str, Entry]

    @field_validator("expects", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: {"record": True} if entry == "record" else entry for name, entry in value.items()}

    @field_validator("expects")
    @classmethod
    def _known(cls, value: dict[str, Entry]) -> dict[str, Entry]:
        for name in value:
            if name not in LOOKUPS and not name.startswith(("python:", "system:")):
                near = difflib.get_close_matches(name, LOOKUPS, n=1)
                hint = (
                    f"did you mean '{near[0]}'?"
                    if near
                    else f"use one of {', '.join(LOOKUPS)}, python:NAME, system:NAME"
                )
                raise ValueError(f"'{name}' is no fact of a record; {hint}")
        return value


def read_stack_file(path: Path) -> StackFile:
    """Read a stack file.

    Raises:
        UserError: it is missing, or an entry is wrong.
    """
    try:
        return StackFile.model_validate(read_yaml(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        message, _, mend = first["msg"].removeprefix("Value error, ").partition("; ")
        raise UserError(message, where=f"{path}: {key}", mend=mend or "mend that entry") from None


@dataclass(frozen=True)
class Line:
    """One line of the table: what was expected, what was found, and what follows."""

    name: str
    policy: Policy
    expected: str
    found: Value
    verdict: Verdict
    mend: str = ""
    reference: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def compare(stack: StackFile, record: Mapping[str, Any]) -> list[Line]:
    """Every entry of a stack file against the record of an environment."""
    return [_line(name, entry, look_up(name, record)) for name, entry in stack.expects.items()]


def _line(name: str, entry: Entry, found: Value) -> Line:
    verdict: Verdict
    if entry.record:
        verdict = "recorded"
    elif found is None:
        verdict = "missing"
    else:
        verdict = "ok" if _keeps(entry, str(found)) else "mismatch"
    bad = verdict in ("missing", "mismatch")
    return Line(
        name=name,
        policy=entry.policy,
        expected=entry.expected,
        found=found,
        verdict=verdict,
        mend=(entry.mend or _mend(name, entry)) if bad else "",
        reference=entry.reference or "",
    )


def _keeps(entry: Entry, found: str) -> bool:
    if entry.exact is not None:
        return versions.same(found, entry.exact)
    if entry.minimum is not None:
        return versions.at_least(found, entry.minimum)
    return versions.within(found, entry.range or "")


def _mend(name: str, entry: Entry) -> str:
    if name.startswith("python:") or name in ("vllm", "lmcache", "nixl", "torch", "torch_cuda", "python"):
        return f"use the lock that has {name.removeprefix('python:')} {entry.expected}"
    if name.startswith("gpu") or name in ("memory_gib", "cores", "shm_gib"):
        return "run on a machine that has it, or choose another experiment"
    return f"install {name.removeprefix('system:')} {entry.expected}"


def look_up(name: str, record: Mapping[str, Any]) -> Value:
    """A fact by its name in stack files; None where it is not known."""
    facts = Facts(record)
    if name.startswith("python:"):
        return facts.package(name.removeprefix("python:"))
    if name.startswith("system:"):
        value = (facts.machine.get("packages") or {}).get(name.removeprefix("system:"))
        return None if value is None else str(value)
    return LOOKUPS[name](facts)


def _section(part: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        part = part.get(name) if isinstance(part, Mapping) else None  # type: ignore[assignment]
    return part


def _joined(values: list[Any]) -> str | None:
    return ", ".join(sorted({str(value) for value in values if value is not None})) or None


def _gib(value: Any) -> float | None:
    return None if value is None else round(float(value) / GIB, 1)


def _ofed(facts: Facts) -> Value:
    packages = facts.machine.get("packages") or {}
    named: Value = next(
        (packages[name] for name in ("doca-ofed", "doca-all", "mlnx-ofed-all") if name in packages), None
    )
    return named or _section(facts.machine, "ofed", "version")


def _ucx(facts: Facts) -> Value:
    """The UCX that NIXL uses: the one in its wheel, else the system's."""
    bundled = facts.software.get("ucx") or []
    return _joined([found["version"] for found in bundled]) or _section(facts.machine, "ucx", "system")


def _nvlinks(facts: Facts) -> Value:
    """Links that are up, on the GPU that has fewest."""
    links = [sum(speed > 0 for speed in gpu["links_gb_s"]) for gpu in facts.machine.get("nvlink") or []]
    return min(links) if links else None


LOOKUPS: dict[str, Callable[[Facts], Value]] = {
    "os": lambda facts: _section(facts.machine, "system", "os"),
    "kernel": lambda facts: _section(facts.machine, "system", "kernel"),
    "cpu": lambda facts: _section(facts.machine, "cpu", "model"),
    "cores": lambda facts: len(_section(facts.machine, "cpu", "cores_usable") or []) or None,
    "memory_gib": lambda facts: _gib(_section(facts.machine, "memory", "total_bytes")),
    "shm_gib": lambda facts: _gib(_section(facts.machine, "memory", "shm_total_bytes")),
    "gpus": lambda facts: len(facts.gpus),
    "gpu_name": lambda facts: _joined([gpu.get("name") for gpu in facts.gpus]),
    "gpu_memory_gib": lambda facts: min(
        (_gib(gpu.get("memory_bytes")) or 0.0 for gpu in facts.gpus), default=None
    ),
    "gpu_power_limit_w": lambda facts: min(
        (gpu.get("power_limit_w") or 0 for gpu in facts.gpus), default=None
    ),
    "nvlinks": _nvlinks,
    "driver": lambda facts: facts.driver,
    "cuda_driver": lambda facts: _section(facts.machine, "driver", "cuda"),
    "cuda_toolkit": lambda facts: _section(facts.machine, "cuda", "nvcc"),
    "fabric_manager": lambda facts: _section(facts.machine, "fabric_manager", "package"),
    "fabric_manager_service": lambda facts: _section(facts.moment, "fabric_manager", "service"),
    "ofed": _ofed,
    "ucx": _ucx,
    "ucx_system": lambda facts: _section(facts.machine, "ucx", "system"),
    "nixl": lambda facts: facts.package("nixl", "nixl-cu13", "nixl-cu12"),
    "nixl_commit": lambda facts: _section(facts.software, "commits", "nixl"),
    "lmcache": lambda facts: facts.package("lmcache"),
    "vllm": lambda facts: facts.vllm,
    "torch": lambda facts: facts.package("torch"),
    "torch_cuda": lambda facts: facts.cuda,
    "python": lambda facts: facts.software.get("python"),
    "gdrcopy": lambda facts: _section(facts.machine, "direct", "gdrdrv"),
}
