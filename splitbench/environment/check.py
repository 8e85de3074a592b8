# SPDX-License-Identifier: Apache-2.0
"""Does the machine fit the experiment? Expectations of the stack file and rules about what fits together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from splitbench.environment.expectations import Line, StackFile, compare
from splitbench.environment.needs import Needs
from splitbench.environment.rules import Finding, findings

Mode = Literal["fail", "warn"]


@dataclass(frozen=True)
class Check:
    """What was expected, what was found, what does not fit."""

    stack: str
    lines: tuple[Line, ...]
    findings: tuple[Finding, ...]
    probes_failed: tuple[str, ...]
    environment_digest: str

    @property
    def mismatches(self) -> list[Line]:
        """Lines that are not as expected."""
        return [line for line in self.lines if line.verdict in ("mismatch", "missing")]

    @property
    def errors(self) -> list[Finding]:
        """Findings that are known to break a run or its meaning."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against measuring here."""
        return not self.mismatches and not self.errors

    def as_json(self, mode: Mode) -> dict[str, Any]:
        """The record of the check; `went_on` says that the user measured in spite of it."""
        return {
            "stack": self.stack,
            "fits": self.fits,
            "mode": mode,
            "went_on": not self.fits and mode == "warn",
            "expectations": [line.as_json() for line in self.lines],
            "findings": [asdict(finding) for finding in self.findings],
            "probes_failed": list(self.probes_failed),
            "environment_digest": self.environment_digest,
        }

    def summary(self) -> str:
        """One line: what does not fit."""
        parts = [f"{line.name} is {_shown(line.found)}, expected {line.expected}" for line in self.mismatches]
        parts += [f"{finding.message} [{finding.rule}]" for finding in self.errors]
        return "; ".join(parts)

    def text(self) -> list[str]:
        """The table and the findings for a person, in lines."""
        lines = table(self.lines) if self.lines else []
        for finding in self.findings:
            lines.append(f"{finding.severity}: {finding.message} [{finding.rule}]")
            lines.append(f"  {finding.mend}; source: {finding.source}")
        lines += [f"not known: {text}" for text in self.probes_failed]
        return lines


def check(record: Mapping[str, Any], needs: Needs, stack: StackFile | None) -> Check:
    """Compare an environment with what an experiment expects and needs."""
    probes = record.get("probes") or {}
    return Check(
        stack=stack.name if stack is not None else "",
        lines=tuple(compare(stack, record)) if stack is not None else (),
        findings=tuple(findings(record, needs)),
        probes_failed=tuple(
            f"{name} ({probe['source']}) {probe['status']}"
            for name, probe in probes.items()
            if str(probe["status"]).startswith("failed")
        ),
        environment_digest=str(record.get("digest", "")),
    )


def table(lines: Sequence[Line]) -> list[str]:
    """Expected, found, verdict and mend, in columns."""
    rows = [("", "expected", "found", "verdict", "mend")]
    rows += [(line.name, line.expected, _shown(line.found), line.verdict, line.mend) for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    ]


def _shown(value: object) -> str:
    return "not found" if value is None else str(value)
