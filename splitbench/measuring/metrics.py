# SPDX-License-Identifier: Apache-2.0
"""What engines count about themselves: their /metrics page as numbers, and differences over a cell."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

Metrics = dict[str, float]
"""Series as it is printed (`name{label="value"}`) to its value."""

_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> Metrics:
    """Prometheus text format to numbers; comments, unreadable lines, NaN and infinity are left out."""
    values: Metrics = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        series, _, rest = line.rpartition(" ") if "}" not in line else _split_after_labels(line)
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if series and math.isfinite(value):
            values[series] = value
    return values


def _split_after_labels(line: str) -> tuple[str, str, str]:
    end = line.rindex("}") + 1
    return line[:end], " ", line[end:]


def labels_of(series: str) -> dict[str, str]:
    """Labels of a series as a mapping."""
    return dict(_LABEL.findall(series.partition("{")[2]))


def total(metrics: Mapping[str, float], name: str, **labels: str) -> float | None:
    """Sum over all series of a metric whose labels match; None when the engine has no such metric."""
    found = [
        value
        for series, value in metrics.items()
        if series.partition("{")[0] == name
        and all(labels_of(series).get(key) == wanted for key, wanted in labels.items())
    ]
    return sum(found) if found else None


def growth(before: Mapping[str, float], after: Mapping[str, float], name: str, **labels: str) -> float | None:
    """How much a counter grew between two scrapes; None when it is not there afterwards.

    A series that appears in between started from 0.
    """
    end = total(after, name, **labels)
    return None if end is None else end - (total(before, name, **labels) or 0.0)
