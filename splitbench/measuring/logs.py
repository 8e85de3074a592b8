# SPDX-License-Identifier: Apache-2.0
"""Engines' logs around a cell: which part belongs to it, and what known signatures say about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from splitbench.measuring.signatures import SIGNATURES, Signature

PART_LIMIT_BYTES = 16 << 20
"""A part of a log beyond this keeps its first and last half of it."""
IN_FLIGHT_S = 1.0
"""A request that was announced this shortly before the log's last line may still be under way."""

_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\]")
_RETRIEVED = re.compile(r"(?:\[req_id=(?P<request>\S+?)\] )?Retrieved (?P<got>\d{1,15}) out of ")
_NEEDED = re.compile(r"LMCache hit tokens: (?P<hit>\d{1,15}), need to load: (?P<load>-?\d{1,15})")
_TRANSPORTS = re.compile(r"\b(?:rma|am|tag|rma_am)\w*\((?P<lanes>[^)]*)\)")
_LINE_SHOWN = 240


@dataclass(frozen=True)
class EngineLog:
    """What one engine wrote.

    Attributes:
        role: of the engine.
        start: from its start until it was ready.
        cell: during the measured requests.
    """

    role: str
    start: str
    cell: str


@dataclass(frozen=True)
class Finding:
    """A signature that was met.

    Attributes:
        signature: which.
        engine: in whose log.
        part: `start` or `cell`.
        count: lines (or requests) of this kind.
        of: requests that were looked at, for signatures that pair lines; else None.
        line: the first one, cut.
    """

    signature: Signature
    engine: str
    part: str
    count: int
    of: int | None
    line: str


@dataclass(frozen=True)
class Loads:
    """Tokens that an LMCache decoder found and those it loaded, by its own log."""

    requests: int
    found: int
    retrievals: int
    loaded: int


def scan(engine: str, log: EngineLog, *, on_gpus: bool) -> list[Finding]:
    """All findings in one engine's log, in the order of the catalogue."""
    findings: list[Finding] = []
    for part, text in (("start", log.start), ("cell", log.cell)):
        lines = text.splitlines()
        for signature in SIGNATURES:
            if not signature.applies(log.role, on_gpus):
                continue
            found, of = (
                _unanswered(signature, lines)
                if signature.answer
                else ([line for line in lines if signature.regex.search(line)], None)
            )
            if found:
                shown = found[0].strip()[:_LINE_SHOWN]
                findings.append(Finding(signature, engine, part, len(found), of, shown))
    return findings


def scan_all(logs: Mapping[str, EngineLog], *, on_gpus: bool) -> list[Finding]:
    """Findings in the logs of all engines."""
    return [finding for name, log in logs.items() for finding in scan(name, log, on_gpus=on_gpus)]


def _unanswered(signature: Signature, lines: list[str]) -> tuple[list[str], int]:
    """Lines without their answer, and how many lines there are at all."""
    answer = re.compile(signature.answer)
    asked: dict[str, str] = {}
    answered: set[str] = set()
    nameless = 0
    for line in lines:
        if match := signature.regex.search(line):
            asked.setdefault(match["request"], line)
        elif match := answer.search(line):
            if match["request"]:
                answered.add(match["request"])
            else:
                nameless += 1
    end_s = next((stamp for line in reversed(lines) if (stamp := _stamp_s(line)) is not None), None)
    missing = []
    for name, line in asked.items():
        stamp = _stamp_s(line)
        under_way = end_s is not None and stamp is not None and end_s - stamp < IN_FLIGHT_S
        if name not in answered and not under_way:
            missing.append(line)
    # Older versions do not name the request in the answer: then only the numbers can be compared.
    return missing[nameless:], len(asked)


def _stamp_s(line: str) -> float | None:
    match = _STAMP.search(line)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(match[1]).timestamp() + int(match[2]) / 1e3
    except (ValueError, OverflowError):  # the look of a date, and none
        return None


def lmcache_loads(text: str) -> Loads:
    """What an LMCache decoder found and loaded; a hit is not a load.

    Every rank of an engine retrieves its own share of each request and says so: the least counts.
    """
    lines = text.splitlines()
    needed = [match for line in lines if (match := _NEEDED.search(line))]
    nameless = retrievals = 0
    by_request: dict[str, int] = {}
    for line in lines:
        if match := _RETRIEVED.search(line):
            retrievals += 1
            got = int(match["got"])
            if match["request"]:
                by_request[match["request"]] = min(got, by_request.get(match["request"], got))
            else:
                nameless += got
    return Loads(
        requests=len(needed),
        found=sum(int(match["hit"]) for match in needed),
        retrievals=retrievals,
        loaded=nameless + sum(by_request.values()),
    )


def ucx_transports(text: str) -> set[str]:
    """Transports that UCX says it uses between peers, as in `tcp`, `cuda_ipc`, `rc_mlx5`, `posix`.

    UCX prints them at UCX_LOG_LEVEL=info: `... intra-node cfg#2 rma(cuda_ipc/cuda) am(tcp/eth0 ...)`.
    """
    found: set[str] = set()
    for line in text.splitlines():
        if "cfg#" not in line:
            continue
        for match in _TRANSPORTS.finditer(line):
            found.update(lane.partition("/")[0] for lane in match["lanes"].split())
    return found


# -- parts of a log file -------------------------------------------------------------------------------------
def size_of(path: Path) -> int:
    """Bytes that are in a log now; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_part(path: Path, start: int, end: int) -> str:
    """The text between two byte offsets, cut in the middle where it is very long."""
    try:
        with path.open("rb") as handle:
            if end - start <= PART_LIMIT_BYTES:
                handle.seek(start)
                return handle.read(max(0, end - start)).decode("utf-8", errors="replace")
            half = PART_LIMIT_BYTES // 2
            handle.seek(start)
            head = handle.read(half)
            handle.seek(end - half)
            tail = handle.read(half)
    except OSError:
        return ""
    left_out = end - start - 2 * half
    return (head + f"\n[{left_out} bytes left out]\n".encode() + tail).decode("utf-8", errors="replace")


def logs_from_json(content: Mapping[str, Any]) -> dict[str, EngineLog]:
    """Logs as the measuring stage keeps them with a cell."""
    return {
        name: EngineLog(role=str(found["role"]), start=str(found["start"]), cell=str(found["cell"]))
        for name, found in content.items()
    }


def summary(findings: Iterable[Finding]) -> Iterator[str]:
    """Each finding in a few words."""
    for finding in findings:
        of = "" if finding.of is None else f" of {finding.of}"
        yield f"{finding.engine}: {finding.signature.id} ({finding.count}{of} times, {finding.part})"
