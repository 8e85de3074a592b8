# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pandas as pd
import pytest
from figures_data import tables
from PIL import Image

from splitbench.figures.gallery import Drawn, FigureSpec, Measured, draw, draw_again, lineage, write_figure
from splitbench.figures.writer import csv_text
from splitbench.files import canonical_json


@pytest.fixture(scope="module")
def measured() -> Measured:
    found = tables(loads=(1, 8), invalid=(("pd-tp2", 8),))
    return Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])


SPEC = FigureSpec.model_validate({"figure": "ttft_of_layouts", "workload": "long"})


def written(drawn: Drawn, measured: Measured, stem: Path) -> dict[str, object]:
    return write_figure(drawn, stem, lineage(drawn, measured, experiment="trial", stack_digest="5" * 64))


@pytest.fixture(scope="module")
def stem(measured: Measured, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A figure on disk; writing takes most of these tests' time, so it is written once."""
    stem = tmp_path_factory.mktemp("figures") / "ttft-long"
    written(draw(measured, SPEC), measured, stem)
    return stem


def sidecar(stem: Path) -> dict[str, Any]:
    return dict(json.loads(stem.with_suffix(".json").read_text(encoding="utf-8")))


def test_every_form_carries_the_same_lineage(stem: Path) -> None:
    full = sidecar(stem)
    inside = canonical_json(full)

    assert sorted(path.name for path in stem.parent.iterdir()) == [
        f"ttft-long.{form}" for form in ("csv", "json", "pdf", "png", "svg")
    ]
    with Image.open(stem.with_suffix(".png")) as image:
        assert image.info["splitbench"] == inside
    tree = ElementTree.parse(stem.with_suffix(".svg"))
    assert [found.text for found in tree.iter("{http://purl.org/dc/elements/1.1/}description")] == [inside]
    pdf = stem.with_suffix(".pdf").read_bytes()
    keywords = re.search(rb"/Keywords \((.*?)(?<!\\)\)\s", pdf, re.DOTALL)
    assert keywords is not None
    assert json.loads(re.sub(rb"\\([()\\])", rb"\1", keywords[1]).decode("latin1")) == full


def test_the_sidecar_names_cells_digests_and_slice(measured: Measured, stem: Path) -> None:
    full = sidecar(stem)
    assert full["experiment"] == "trial"
    assert full["stack_digest"] == "5" * 64
    assert full["spec"] == SPEC.model_dump(mode="json")
    digests = measured.cells.set_index("cell_id")["cell_digest"].to_dict()
    assert full["cells"] == {cell: digests[cell] for cell in digests if "/c8/" in cell}
    assert full["invalid_cells"] == ["pd-tp2-0a0a0a0a/long-0b0b0b0b/c8/0-0"]
    assert "successful requests per line" in str(full["caption"])


def test_drawn_again_from_the_sidecar_every_byte_is_the_same(
    measured: Measured, stem: Path, tmp_path: Path
) -> None:
    # A user's own matplotlib settings must not change a figure either.
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "savefig.dpi": 20, "svg.hashsalt": "x"}):
        written(draw_again(measured, sidecar(stem)), measured, tmp_path / stem.name)
    for form in ("png", "pdf", "svg", "csv", "json"):
        one, two = ((folder / f"{stem.name}.{form}").read_bytes() for folder in (stem.parent, tmp_path))
        assert one == two, form
    assert b"CreationDate" not in stem.with_suffix(".pdf").read_bytes()
    assert b"<dc:date>" not in stem.with_suffix(".svg").read_bytes()


def test_cells_measured_later_change_nothing_drawn_again(measured: Measured, stem: Path) -> None:
    more = tables(loads=(1, 8, 32), invalid=(("pd-tp2", 8),))
    grown = Measured.from_frames(more["cells"], more["requests"], more["tokens"], more["checks"])
    assert draw_again(grown, sidecar(stem)).data.equals(draw(measured, SPEC).data)
    assert not draw(grown, SPEC).data.equals(draw(measured, SPEC).data)


def test_the_csv_is_the_drawn_data(measured: Measured, stem: Path) -> None:
    read = pd.read_csv(stem.with_suffix(".csv"), keep_default_na=False)
    drawn = draw(measured, SPEC).data
    assert read["x_ms"].tolist() == drawn["x_ms"].tolist()
    assert read["share"].tolist() == drawn["share"].tolist()


def test_a_failed_write_leaves_the_old_file(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f.png").write_bytes(b"old")
    drawn = draw(measured, SPEC)

    def fail(path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(drawn.figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        written(drawn, measured, tmp_path / "f")
    assert (tmp_path / "f.png").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["f.png"]


def test_the_csv_is_what_pandas_writes() -> None:
    frame = pd.DataFrame(
        {
            "name": ["a", 'say "b", c', None, "a"],
            "x": [1.5, 1e-7, float("nan"), float("inf")],
            "n": [1, 2, 3, 1 << 40],
            "small": pd.Series([1, 2, 3, 4], dtype="int32"),
            "ok": [True, False, True, True],
            "mixed": [1.0, "x", None, 2],
            "single": pd.Series([0.1, 2.5, 3.25, 4.0], dtype="float64"),
        }
    )
    assert csv_text(frame) == frame.to_csv(index=False, lineterminator="\n")
    assert csv_text(frame.iloc[:0]) == frame.iloc[:0].to_csv(index=False, lineterminator="\n")
