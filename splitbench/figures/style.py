# SPDX-License-Identifier: Apache-2.0
"""One meaning each: colour is load or budget, line style is kind, marker is percentile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import matplotlib.style
from matplotlib.colors import LinearSegmentedColormap, to_hex

from splitbench.figures.measured import Layout

# Okabe and Ito's palette without those too light for a line on white; safe for the common colour
# deficiencies.
BUDGET_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a3487f", "#5c4d00", "#1a1a1a")
SLO_COLOUR = "#b00020"
NEUTRAL = "#4d4d4d"

# From orange (little load) to near black (much). Lightness falls evenly, so it reads in grey too; the
# smallest colour difference between any two of six lines is 26 (CIE 1976) for normal sight and at least 17
# with deuteranopia, protanopia or tritanopia; plasma over the same contrast has 15 and 9. Contrast on white
# is at least 2.2.
_LOAD_RAMP = LinearSegmentedColormap.from_list(
    "load", ["#ef9a2f", "#d8567a", "#7b3fc0", "#1c2a7a", "#050512"]
)
_ONLY_LINE = 0.55

Dash = tuple[int, tuple[float, ...]] | str
_DASHES: dict[str, tuple[Dash, ...]] = {
    "aggregated": ("solid",),
    "pd": ((0, (4.0, 1.6)), (0, (1.6, 1.2)), (0, (7.0, 1.6))),
    "replicas": ((0, (6.0, 1.4, 1.2, 1.4)), (0, (6.0, 1.4, 1.2, 1.4, 1.2, 1.4))),
}

_PERCENTILE_MARKERS = {50.0: "o", 90.0: "s", 95.0: "P", 99.0: "^", 99.5: "v", 99.9: "D"}


@contextmanager
def styled() -> Iterator[None]:
    """The package's style on top of matplotlib's own defaults; a user's matplotlibrc changes nothing."""
    sheet = str(files("splitbench.figures") / "splitbench.mplstyle")
    with matplotlib.style.context(["default", sheet]):
        yield


def load_strokes(concurrencies: Sequence[int]) -> dict[int, dict[str, Any]]:
    """How the line of each concurrency is drawn: darker and a little wider with load."""
    ordered = sorted(set(concurrencies))
    span = max(len(ordered) - 1, 1)
    places = {value: i / span if len(ordered) > 1 else _ONLY_LINE for i, value in enumerate(ordered)}
    return {
        value: {"color": to_hex(_LOAD_RAMP(place)), "linewidth": 0.95 + 0.45 * place}
        for value, place in places.items()
    }


def layout_strokes(layouts: Sequence[Layout]) -> dict[str, dict[str, Any]]:
    """Per layout, how its lines are drawn: same colour for the same budget, same dashes for the same kind.

    A second layout of one kind and budget gets another dash of its kind, and from the third use of a dash a
    thinner line, so that no two layouts are drawn alike.
    """
    budgets = list(dict.fromkeys(layout.budget for layout in sorted(layouts, key=_budget_size)))
    used: dict[tuple[str, str], int] = {}
    strokes: dict[str, dict[str, Any]] = {}
    for layout in layouts:
        nth = used.get((layout.kind, layout.budget), 0)
        used[layout.kind, layout.budget] = nth + 1
        dashes = _DASHES[layout.kind]
        strokes[layout.name] = {
            "color": BUDGET_COLOURS[budgets.index(layout.budget) % len(BUDGET_COLOURS)],
            "linestyle": dashes[nth % len(dashes)],
            "linewidth": 1.3 / (1.6 ** (nth // len(dashes))),
        }
    return strokes


def _budget_size(layout: Layout) -> tuple[str, int]:
    count, _, noun = layout.budget.partition(" ")
    return noun.rstrip("s"), int(count)


def percentile_marker(percentile: float) -> str:
    """A marker per percentile, the same in all figures."""
    return _PERCENTILE_MARKERS.get(float(percentile), "X")


def percentile_name(percentile: float) -> str:
    """P50, P99.9."""
    return f"P{percentile:g}"
