# SPDX-License-Identifier: Apache-2.0
"""Figures on disk: three pictures, data and sidecar, the same lineage in each, no dates anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from splitbench import __version__
from splitbench.figures.curves import Drawn
from splitbench.figures.measured import Measured
from splitbench.figures.spec import FigureSpec
from splitbench.figures.style import styled
from splitbench.files import canonical_json, digest, write_json, written_aside

SUFFIXES = (".png", ".pdf", ".svg", ".csv", ".json")
PNG_KEY = "splitbench"


def lineage(drawn: Drawn, measured: Measured, *, experiment: str, **more: Any) -> dict[str, Any]:
    """What a figure rests on: experiment, config slice, cells with their digests, code version.

    `more` is added as it is (stack and environment digests, for instance) and must be JSON.
    """
    rows = measured.cells.set_index("cell_id")
    digests = rows["cell_digest"] if "cell_digest" in rows.columns else None
    return {
        "experiment": experiment,
        "spec": drawn.spec.model_dump(mode="json"),
        "cells": {cell: None if digests is None else _text(digests[cell]) for cell in drawn.cells},
        **more,
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def write_figure(drawn: Drawn, stem: Path, sidecar: Mapping[str, Any]) -> dict[str, Any]:
    """Write `stem`.png, .pdf, .svg, .csv and .json, each complete or absent; same input, same bytes.

    The sidecar gets the caption, the invalid cells, the code version and the data's digest added. The
    pictures carry all of it as canonical JSON: PNG in the text chunk `splitbench`, PDF in the keywords, SVG
    in the description.

    Returns:
        The full sidecar, as written.
    """
    data = csv_text(drawn.data)
    full = {
        "code_version": __version__,
        "drawn_with": f"matplotlib {matplotlib.__version__}",
        **sidecar,
        "figure": stem.name,
        "caption": drawn.caption,
        "invalid_cells": list(drawn.invalid),
        "data_sha256": digest(data),
    }
    inside = canonical_json(full)
    title = f"{full.get('experiment', 'splitbench')}: {stem.name}"
    metadata: dict[str, dict[str, Any]] = {
        "png": {"Title": title, "Description": drawn.caption, PNG_KEY: inside, "Software": "splitbench"},
        "pdf": {
            "Title": title,
            "Subject": drawn.caption,
            "Keywords": inside,
            "Creator": "splitbench",
            "CreationDate": None,
        },
        "svg": {"Title": title, "Description": inside, "Creator": "splitbench", "Date": None},
    }
    with styled():
        for form, facts in metadata.items():
            with written_aside(stem.with_name(f"{stem.name}.{form}")) as aside:
                drawn.figure.savefig(aside, format=form, metadata=facts)
    with written_aside(stem.with_name(f"{stem.name}.csv")) as aside:
        aside.write_text(data, encoding="utf-8")
    write_json(stem.with_name(f"{stem.name}.json"), full)
    return full


def csv_text(data: pd.DataFrame) -> str:
    """What `to_csv(index=False, lineterminator="\\n")` gives, three times as fast on drawn corners."""
    columns = [_column_text(data[name]) for name in data.columns]
    head = ",".join(map(_quoted, map(str, data.columns)))
    return "\n".join([head, *map(",".join, zip(*columns, strict=True)), ""])


def _column_text(column: pd.Series) -> list[str]:
    values = column.tolist()
    if column.dtype == np.float64:
        return ["" if value != value else repr(value) for value in values]
    # A few names, counts and truth values, a great many times.
    known = {value: _cell_text(value) for value in set(values)}
    return [known[value] for value in values]


def _cell_text(value: Any) -> str:
    return "" if value is None or value != value else _quoted(str(value))


def _quoted(text: str) -> str:
    if any(sign in text for sign in ',"\n\r'):
        return '"' + text.replace('"', '""') + '"'
    return text


def read_png_lineage(path: Path) -> str | None:
    """The lineage inside a PNG, as canonical JSON; None if there is none."""
    from PIL import Image

    with Image.open(path) as image:
        found = image.info.get(PNG_KEY)
    return found if isinstance(found, str) else None


def spec_of(sidecar: Mapping[str, Any]) -> FigureSpec:
    """The spec that a sidecar's figure was drawn from."""
    return FigureSpec.model_validate(sidecar["spec"])
