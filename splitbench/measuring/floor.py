# SPDX-License-Identifier: Apache-2.0
"""The measurement floor: what the client itself adds to latencies, as its self-test found it; plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitbench.files import read_json

Row = Mapping[str, float]
"""What the self-test found at one number of streams: `streams`, `itl_error_p50_ms`, `itl_error_p99_ms`, ..."""


@dataclass(frozen=True)
class Floor:
    """Size of the client's error on an ITL.

    Attributes:
        streams: requests in flight at which it was measured.
        p50_ms: half of the gaps are off by at most this.
        p99_ms: 99 % of the gaps are.
    """

    streams: int
    p50_ms: float
    p99_ms: float


def read_floor(path: Path) -> dict[str, Any] | None:
    """The self-test's record; None where it was not run."""
    return read_json(path) if path.exists() else None


def nearest(rows: Sequence[Row], streams: float | None) -> Floor | None:
    """The floor at this many requests in flight, from the nearest number (by ratio) that was measured.

    None where nothing was measured, or nobody knows how many were in flight.
    """
    if not rows or not streams:
        return None
    row = min(rows, key=lambda row: abs(math.log(row["streams"] / streams)))
    return Floor(int(row["streams"]), float(row["itl_error_p50_ms"]), float(row["itl_error_p99_ms"]))
