# SPDX-License-Identifier: Apache-2.0
"""What the readers of foreign formats share."""

from __future__ import annotations

import datetime
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from splitbench.errors import UserError
from splitbench.tables.cellwriter import Requests
from splitbench.tables.numbers import Floats, Ints

_PER_SECOND = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0, "sec": 1.0, "seconds": 1.0}


@dataclass
class Request:
    """One request as a foreign file states it; seconds; None is "not stated"."""

    ok: bool = True
    error: str | None = None
    start_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    queue_s: float | None = None
    itl_mean_s: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    gaps_s: Sequence[float] = ()


@dataclass
class Imported:
    """One cell's worth of a foreign file.

    Attributes:
        facts: columns of the cells row that the file states.
        rows: its requests, in submission order; empty where the file has only totals.
        has_gaps: whether the format states single gaps at all.
    """

    facts: dict[str, Any]
    rows: list[Request] = field(default_factory=list)
    has_gaps: bool = False

    def requests(self) -> Requests:
        """The per-request columns; a column that no request has is None."""
        return Requests(
            ok=np.array([r.ok for r in self.rows], dtype=np.bool_),
            errors=["" if r.error is None else r.error for r in self.rows],
            start_s=self._column("start_s"),
            ttft_s=self._column("ttft_s"),
            # A request without a stated end has an unknown latency, which must not become a sum of its gaps.
            e2e_s=self._column("e2e_s", always=bool(self.rows)),
            queue_s=self._column("queue_s"),
            itl_mean_s=self._column("itl_mean_s"),
            input_tokens=self._column("input_tokens"),
            output_tokens=self._column("output_tokens"),
        )

    def _column(self, name: str, always: bool = False) -> Floats | None:
        values = [getattr(r, name) for r in self.rows]
        if not always and all(v is None for v in values):
            return None
        return np.array([np.nan if v is None else v for v in values], dtype=np.float64)

    def gaps(self) -> Iterator[tuple[Floats, Ints]]:
        """The ITLs in seconds, as `write_cell` takes them."""
        for at in range(0, len(self.rows) if self.has_gaps else 0, 4096):
            some = self.rows[at : at + 4096]
            lengths = np.array([len(r.gaps_s) for r in some], dtype=np.int64)
            yield np.array([g for r in some for g in r.gaps_s], dtype=np.float64), lengths


def load(path: Path) -> Any:
    """Decode a whole JSON file, NaN and Infinity included.

    Raises:
        UserError: it is no JSON, with the byte.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    if not raw.strip():
        raise UserError("file is empty; a result is expected", where=str(path))
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _load_loosely(raw, path)


def _load_loosely(raw: bytes, path: Path) -> Any:
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        at = len(error.doc[: error.pos].encode("utf-8", "replace"))
        what = "ends early" if at >= len(raw.rstrip()) else "is no JSON"
        raise UserError(f"{what} at byte {at}: {error.msg}", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"is no JSON: {error}", where=str(path)) from error


def get(value: Any, *keys: str) -> Any:
    """A value deep inside nested objects; None where any step is missing or no object."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def first(*values: Any) -> Any:
    """The first that is not None."""
    return next((v for v in values if v is not None), None)


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def whole(value: Any) -> int | None:
    """A whole number; None for anything else."""
    found = number(value)
    return int(found) if found is not None else None


def seconds(value: Any, unit: Any) -> float | None:
    """A duration in seconds from a number and its unit; None if either is unknown."""
    found, per_second = number(value), _PER_SECOND.get(str(unit))
    return None if found is None or per_second is None else found / per_second


def less(end: Any, start: Any) -> float | None:
    """end - start; None if either is missing."""
    a, b = number(end), number(start)
    return None if a is None or b is None else a - b


def items(value: Any) -> list[Any]:
    """A list as it is; an empty one for anything else."""
    return value if isinstance(value, list) else []


def moment(epoch_s: Any) -> datetime.datetime | None:
    """Time of day in UTC from seconds since 1970; None if there is none or it is absurd."""
    found = number(epoch_s)
    if found is None or not 1e9 < found < 1e10:
        return None
    return datetime.datetime.fromtimestamp(found, datetime.UTC)


def flat_numbers(value: Any, skip: Iterable[str] = (), prefix: str = "") -> dict[str, float]:
    """Every number inside nested objects, under its dotted path."""
    found: dict[str, float] = {}
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if not prefix and key in skip:
            continue
        if isinstance(inner, Mapping):
            found |= flat_numbers(inner, prefix=f"{prefix}{key}.")
        elif isinstance(inner, int | float) and not isinstance(inner, bool):
            found[f"{prefix}{key}"] = float(inner)
    return found


def texts(value: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """These keys' values as text (JSON where they are none), left out where missing."""
    kept = {key: value[key] for key in keys if value.get(key) is not None}
    return {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in kept.items()}


def differences(times: Sequence[Any], per_second: float = 1.0) -> list[float]:
    """Gaps between times, in seconds; whole numbers are subtracted as such, which keeps their nanoseconds."""
    return [(b - a) / per_second for a, b in itertools.pairwise(times)]
