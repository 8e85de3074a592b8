# SPDX-License-Identifier: Apache-2.0
"""Cells that were made in another environment than their neighbours: numbers that do not belong side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


def strangers(cells: Any) -> dict[str, str]:
    """Cells whose environment is not the one that most cells of their experiment ran in.

    Args:
        cells: data frame with `cell_id` and `environment_digest`; a cell whose digest is not known is no stranger.

    Returns:
        per cell id, the finding in words.
    """
    if "environment_digest" not in cells:
        return {}
    known: Mapping[str, str] = {
        str(row["cell_id"]): row["environment_digest"]
        for row in cells.to_dict("records")
        if isinstance(row["environment_digest"], str) and row["environment_digest"]
    }
    if len(set(known.values())) < 2:
        return {}
    counted = Counter(known.values())
    # As many on both sides: the smaller digest counts as home, so that the same table says the same every time.
    home = min(counted, key=lambda digest: (-counted[digest], digest))
    return {
        cell: f"made in environment {digest[:8]}, {counted[home]} of {len(known)} cells in {home[:8]}"
        for cell, digest in known.items()
        if digest != home
    }
