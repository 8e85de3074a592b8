# SPDX-License-Identifier: Apache-2.0
"""Figures as pictures against kept ones, with tolerance. Look at new ones before you keep them:

python tests/unit/test_figures_images.py
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from figures_data import tables
from PIL import Image

from splitbench.figures.gallery import FigureSpec, Measured, draw
from splitbench.figures.style import styled

KEPT = Path(__file__).parent / "figures_kept"
# Share of pixels that may differ by over a fifth of the range: anti-aliasing of another FreeType moves fewer,
# a missing line, marker or legend more.
TOLERANCE = 0.002
SPECS: dict[str, dict[str, object]] = {
    "itl-by-concurrency": {"figure": "itl_by_concurrency", "layouts": ["agg-tp4", "pd-tp2"]},
    "itl-by-concurrency-window": {
        "figure": "itl_by_concurrency",
        "layouts": ["agg-tp4", "pd-tp2"],
        "window": {"x_min_ms": 2, "x_max_ms": 150, "y_min": 0.9, "x_scale": "linear"},
    },
    "ttft-of-layouts": {"figure": "ttft_of_layouts"},
    "itl-tail-of-layouts": {"figure": "itl_tail_of_layouts", "percentiles": [50, 90, 99, 99.9], "slo_ms": 30},
    "itl-against-concurrency": {"figure": "itl_against_concurrency", "slo_ms": 30},
    "goodput": {"figure": "goodput", "limits": {"itl_ms": 30}},
    "break-even": {"figure": "break_even", "margin_percent": 5},
    "interference": {"figure": "interference", "time_window_s": [2, 5]},
}


def picture(spec: dict[str, object]) -> Image.Image:
    found = tables(repeats=2, invalid=(("pd-tp2", 8),))
    measured = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    drawn = draw(measured, FigureSpec.model_validate({"workload": "long", **spec}))
    buffer = io.BytesIO()
    with styled():
        drawn.figure.savefig(buffer, dpi=72)
    return Image.open(buffer).convert("RGB")


def differing(one: Image.Image, two: Image.Image) -> float:
    """Share of pixels that differ clearly; 1 for another size."""
    if one.size != two.size:
        return 1.0
    gap = np.abs(np.asarray(one, dtype=np.int16) - np.asarray(two, dtype=np.int16)).max(axis=2)
    return float((gap > 51).mean())


@pytest.mark.parametrize("name", SPECS)
def test_figures_look_as_kept(name: str, tmp_path: Path) -> None:
    now = picture(SPECS[name])
    now.save(tmp_path / f"{name}.png")
    with Image.open(KEPT / f"{name}.png") as kept:
        share = differing(now, kept.convert("RGB"))
    assert share <= TOLERANCE, f"{100 * share:.2f} % of pixels differ; look at {tmp_path / name}.png"


def test_the_tolerance_lets_no_change_of_colour_or_marker_pass() -> None:
    base = SPECS["itl-against-concurrency"]
    with Image.open(KEPT / "itl-against-concurrency.png") as kept:
        same = kept.convert("RGB")
    for change in ({"percentiles": [99.9]}, {"slo_ms": 25}, {"layouts": ["agg-tp4", "agg-tp8", "pd-tp2"]}):
        assert differing(picture({**base, **change}), same) > TOLERANCE


if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    for one, wanted in SPECS.items():
        picture(wanted).save(KEPT / f"{one}.png", optimize=True)
