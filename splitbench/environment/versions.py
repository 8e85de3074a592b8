# SPDX-License-Identifier: Apache-2.0
"""Comparing versions as they are written: PEP 440, Debian's, drivers'.

What is compared are the numbers up to the first thing that is none of them, and whether that is a pre-release:
`580.95.05-0ubuntu1` is 580.95.5, `2.11.0+cu130` is 2.11.0, `1.5.0rc1` comes before 1.5.0.
"""

from __future__ import annotations

import re

_PARTS = re.compile(r"^\s*v?(?:\d+:)?(\d+(?:\.\d+)*)(.*)$", re.DOTALL)
_BEFORE = re.compile(r"^[._-]?(dev|alpha|a|beta|b|c|rc|pre|preview)[._-]?(\d*)", re.IGNORECASE)
_AFTER = re.compile(r"^[._-]?(?:post|rev|r)[._-]?(\d*)", re.IGNORECASE)
_PHASES = {"dev": -4, "alpha": -3, "a": -3, "beta": -2, "b": -2, "c": -1, "rc": -1, "pre": -1, "preview": -1}
_CLAUSE = re.compile(r"^\s*(>=|<=|==|!=|>|<)\s*([^\s,]+)\s*$")

Key = tuple[tuple[int, ...], int, int]


def key(text: str) -> Key | None:
    """Sorts like the version it belongs to; None for what is no version (a commit, a name)."""
    match = _PARTS.match(text)
    if match is None:
        return None
    release = [int(part) for part in match[1].split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    phase, number = 0, 0
    if before := _BEFORE.match(match[2]):
        phase, number = _PHASES[before[1].lower()], int(before[2] or 0)
    elif after := _AFTER.match(match[2]):
        phase, number = 1, int(after[1] or 0)
    return tuple(release), phase, number


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version; empty for what is none."""
    found = key(text)
    return found[0] if found else ()


def major(text: str | None) -> int | None:
    """The first number of a version; None without one."""
    numbers = release(text or "")
    return numbers[0] if numbers else None


def same(found: str, wanted: str) -> bool:
    """Whether `found` is what `wanted` says; a distribution's or build's suffix counts only where it is wanted."""
    if found == wanted:
        return True
    if re.search(r"[+~-]", wanted) or key(wanted) is None:
        return False
    return key(found) == key(wanted)


def at_least(found: str, wanted: str) -> bool:
    """Whether a version is another one or newer; False where either is none."""
    a, b = key(found), key(wanted)
    return a is not None and b is not None and a >= b


def valid_range(text: str) -> bool:
    """Whether a range such as `>=0.10.2,<=0.16` can be read."""
    return all(
        (match := _CLAUSE.match(clause)) is not None
        and (key(match[2].removesuffix(".*")) is not None)
        and (not match[2].endswith(".*") or match[1] in ("==", "!="))
        for clause in text.split(",")
    )


def within(found: str, text: str) -> bool:
    """Whether a version keeps every clause of a range: `>=`, `<=`, `>`, `<`, `==`, `!=`, the last two also `1.2.*`.

    Raises:
        ValueError: the range can't be read.
    """
    if not valid_range(text):
        raise ValueError(f"'{text}' is no range")
    return all(_keeps(found, clause) for clause in text.split(","))


def _keeps(found: str, clause: str) -> bool:
    match = _CLAUSE.match(clause)
    have = key(found)
    if match is None or have is None:
        return False
    operator, wanted = match[1], match[2]
    if wanted.endswith(".*"):
        prefix = [int(part) for part in wanted[:-2].split(".")]
        padded = [*have[0], *[0] * len(prefix)][: len(prefix)]
        return (padded == prefix) == (operator == "==")
    than = key(wanted)
    if than is None:
        return False
    return {
        ">=": have >= than,
        "<=": have <= than,
        ">": have > than,
        "<": have < than,
        "==": have == than,
        "!=": have != than,
    }[operator]
