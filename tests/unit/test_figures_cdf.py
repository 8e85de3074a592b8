# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import numpy as np
import pytest
from figures_data import tables, watched
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from pydantic import ValidationError

from splitbench.errors import UserError
from splitbench.figures.gallery import FIGURE_NAMES, Drawn, FigureSpec, Measured, Window, draw
from splitbench.figures.style import layout_strokes, load_strokes


def measured(**more: object) -> Measured:
    found = tables(**more)  # type: ignore[arg-type]
    return Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])


def spec(figure: str, **more: object) -> FigureSpec:
    return FigureSpec.model_validate({"figure": figure, "workload": "long", **more})


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def clashes(drawn: Drawn) -> list[str]:
    """Legends, titles, axis labels and tick labels that leave the paper or lie on one another."""
    figure = drawn.figure
    figure.draw_without_rendering()
    boxes = [("legend", legend.get_window_extent()) for legend in figure.legends]
    boxes += [(text.get_text(), text.get_window_extent()) for text in figure.texts]
    for ax in figure.axes:
        boxes += [
            (part.get_text(), part.get_window_extent())
            for part in (ax._left_title, ax.title, ax.xaxis.label, ax.yaxis.label)
            if part.get_text()
        ]
        boxes += [("panel", ax.get_window_extent())]
    found = []
    for name, box in boxes:
        if box.x0 < -1 or box.y0 < -1 or box.x1 > figure.bbox.x1 + 1 or box.y1 > figure.bbox.y1 + 1:
            found.append(f"{name} leaves the paper")
    for (a, one), (b, two) in itertools.combinations(boxes, 2):
        width = min(one.x1, two.x1) - max(one.x0, two.x0)
        height = min(one.y1, two.y1) - max(one.y0, two.y0)
        if width > 1 and height > 1:
            found.append(f"{a} lies on {b}")
    return found


def test_panels_of_all_layouts_share_both_axes() -> None:
    drawn = draw(measured(), spec("itl_by_concurrency"))
    axes = drawn.figure.axes
    assert len(axes) == 4
    assert len({ax.get_xlim() for ax in axes}) == 1
    assert len({ax.get_ylim() for ax in axes}) == 1
    assert [ax._left_title.get_text() for ax in axes] == [
        "agg-tp4 (aggregated, 4 GPUs)",
        "agg-tp8 (aggregated, 8 GPUs)",
        "pd-tp2 (PD, 4 GPUs)",
        "pd-tp4 (PD, 8 GPUs)",
    ]
    # Budgets in columns: aggregated above PD of the same budget.
    assert axes[0].get_position().x0 == axes[2].get_position().x0
    assert axes[0].get_position().y0 > axes[2].get_position().y0


def test_drawn_lines_are_the_exact_distribution() -> None:
    m = measured()
    drawn = draw(m, spec("itl_by_concurrency", layouts=["agg-tp4"]))
    (ax,) = drawn.figure.axes
    lines = [line for line in ax.lines if line.get_drawstyle() == "steps-post"]
    assert len(lines) == 3
    for line, load in zip(lines, (1, 8, 32), strict=True):
        values, _ = m.values(f"agg-tp4-0a0a0a0a/long-0b0b0b0b/c{load}/0-0", "itl_ms")
        x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        assert np.array_equal(y[1:], [(values <= at).mean() for at in x[1:]])
        assert x[-1] == values[-1]
        assert y[-1] == 1.0


def test_the_window_of_the_config_is_drawn() -> None:
    window = {"x_min_ms": 2, "x_max_ms": 150, "y_min": 0.9, "y_max": 1, "x_scale": "linear"}
    drawn = draw(measured(), spec("itl_by_concurrency", window=window))
    ax = drawn.figure.axes[0]
    assert ax.get_xlim() == (2, 150)
    assert ax.get_xscale() == "linear"
    assert 0.89 < ax.get_ylim()[0] < 0.9
    assert "The x axis ends at 150 ms" in drawn.caption
    log = draw(measured(), spec("itl_by_concurrency", window={"x_scale": "log", "x_min_ms": 1}))
    assert log.figure.axes[0].get_xscale() == "log"


def test_n_stands_at_every_line() -> None:
    drawn = draw(measured(), spec("itl_by_concurrency", layouts=["agg-tp4", "pd-tp2"]))
    legend = [text.get_text() for text in drawn.figure.legends[0].get_texts()]
    assert legend == ["c=1: 12 req, 480 ITLs", "c=8: 96 req, 3,840 ITLs", "c=32: 384 req, 15,360 ITLs"]
    assert "n = 12 to 384 successful requests per line" in drawn.caption


def test_unsupported_percentiles_are_hollow_and_flagged() -> None:
    drawn = draw(measured(), spec("itl_by_concurrency", layouts=["agg-tp4"]))
    rows = drawn.data[drawn.data["what"] == "P99"].set_index("concurrency")
    assert rows["supported"].to_dict() == {1: False, 8: False, 32: True}
    (ax,) = drawn.figure.axes
    faces = [line.get_markerfacecolor() for line in ax.lines if line.get_marker() == "^"]
    assert [face == "white" for face in faces] == [True, True, False]
    assert any("too few requests (P99 needs 368)" in text for text in texts(drawn.figure))


def test_invalid_cells_are_ticked_without_percentiles_and_named() -> None:
    drawn = draw(
        measured(invalid=(("pd-tp2", 32),)), spec("itl_by_concurrency", layouts=["agg-tp4", "pd-tp2"])
    )
    assert drawn.invalid == ("pd-tp2-0a0a0a0a/long-0b0b0b0b/c32/0-0",)
    bad = drawn.data[(drawn.data["layout"] == "pd-tp2") & (drawn.data["concurrency"] == 32)]
    assert set(bad["what"]) == {"curve"}
    assert not bad["valid"].any()
    ticked = [line for ax in drawn.figure.axes for line in ax.lines if line.get_path_effects()]
    assert len(ticked) == 1
    assert "c=32: INVALID (completion), 192 req, 7,680 ITLs" in texts(drawn.figure)
    assert "pd-tp2 at c=32 (completion)" in drawn.caption
    assert clashes(drawn) == []


def test_ttfts_of_different_content_bring_the_second_token() -> None:
    drawn = draw(measured(), spec("ttft_of_layouts"))
    first, second = drawn.figure.axes
    assert "not the same content" in first._left_title.get_text()
    assert second.get_xlabel() == "Time to second token (ms)"
    assert set(drawn.data["metric"]) == {"ttft_ms", "second_token_ms"}
    assert "second token, which has the same content everywhere" in drawn.caption
    # Same content everywhere: one panel is enough.
    assert len(draw(measured(first_token="decoder"), spec("ttft_of_layouts")).figure.axes) == 1
    only_pd = draw(measured(), spec("ttft_of_layouts", layouts=["pd-tp2", "pd-tp4"]))
    assert len(only_pd.figure.axes) == 1


def test_colour_is_budget_and_dash_is_kind() -> None:
    drawn = draw(measured(), spec("itl_of_layouts"))
    lines = [line for line in drawn.figure.axes[0].lines if line.get_drawstyle() == "steps-post"]
    colours = [line.get_color() for line in lines]
    dashes = [line.get_linestyle() for line in lines]
    assert colours[0] == colours[2] != colours[1] == colours[3]
    assert dashes == ["-", "-", "--", "--"]
    assert "at c=32" in drawn.figure.texts[0].get_text()


def test_no_two_layouts_are_drawn_alike() -> None:
    m = measured()
    one = m.layouts("long", ["pd-tp2"])[0]
    many = [type(one)(f"pd-{i}", "pd", "4 GPUs", None) for i in range(5)]
    strokes = layout_strokes(many)
    assert len({repr(stroke) for stroke in strokes.values()}) == 5
    assert len({stroke["color"] for stroke in strokes.values()}) == 1


def test_load_colours_darken_and_stand_out_from_paper() -> None:
    def luminance(colour: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    light = [luminance(stroke["color"]) for stroke in load_strokes([1, 2, 4, 8, 16, 32]).values()]
    assert light == sorted(light, reverse=True)
    assert min(1.05 / (value + 0.05) for value in light) > 2.2


def test_hand_off_gaps_show_only_where_the_prefiller_sends_the_first_token() -> None:
    drawn = draw(measured(), spec("handoff_gap_by_concurrency"))
    assert sorted(set(drawn.data["layout"])) == ["pd-tp2", "pd-tp4"]
    # A gap may be negative; the axis holds it.
    assert drawn.figure.axes[0].get_xlim()[0] <= drawn.data["x_ms"].min() < 0
    assert clashes(drawn) == []
    with pytest.raises(UserError, match="no hand-off gap shows"):
        draw(measured(), spec("handoff_gap_by_concurrency", layouts=["agg-tp4"]))


def test_every_figure_of_the_list_can_be_drawn() -> None:
    found = tables()
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"], watched)
    for name in FIGURE_NAMES:
        drawn = draw(m, spec(name))
        assert len(drawn.data) > 0
        assert drawn.caption.endswith(".")
        assert clashes(drawn) == [], name


def test_one_concurrency_is_the_highest_that_all_have() -> None:
    found = tables()
    cells = found["cells"]
    cells = cells[~((cells["layout"] == "pd-tp2") & (cells["concurrency"] == 32))]
    m = Measured.from_frames(cells, found["requests"], found["tokens"], found["checks"])
    assert set(draw(m, spec("itl_of_layouts")).data["concurrency"]) == {8}
    assert set(draw(m, spec("itl_of_layouts", concurrency=1)).data["concurrency"]) == {1}


def test_repeats_show_as_a_band() -> None:
    drawn = draw(measured(repeats=3), spec("itl_of_layouts"))
    assert len(drawn.figure.axes[0].collections) == 4
    assert any(text == "range of repeats" for text in texts(drawn.figure))
    assert "from 3 cells each" in drawn.caption
    assert draw(measured(), spec("itl_of_layouts")).figure.axes[0].collections[:] == []


@pytest.mark.parametrize("figure", ["itl_tail_by_concurrency", "itl_tail_of_layouts"])
def test_tails_reach_the_last_sample(figure: str) -> None:
    drawn = draw(measured(), spec(figure, percentiles=[50, 90, 99, 99.9]))
    ax = drawn.figure.axes[0]
    assert ax.get_yscale() == "log"
    most = int(drawn.data["samples"].max())
    assert ax.get_ylim()[0] < 1 / most
    assert clashes(drawn) == []


@pytest.mark.parametrize("width", ["auto", "column", "page"])
@pytest.mark.parametrize("figure", ["itl_by_concurrency", "itl_of_layouts", "ttft_of_layouts"])
def test_nothing_overlaps_or_leaves_the_paper(figure: str, width: str) -> None:
    m = measured(loads=(1, 2, 4, 8, 16, 32), invalid=(("agg-tp8", 16), ("pd-tp4", 32)))
    window = {"y_min": 0.999} if figure == "itl_by_concurrency" else {}
    assert clashes(draw(m, spec(figure, width=width, window=window))) == []


def test_long_names_wrap() -> None:
    found = tables(layouts=("agg-tp4", "pd-tp2"))
    for name in ("cells",):
        found[name]["layout"] = found[name]["layout"].replace(
            "agg-tp4", "aggregated tensor parallel four with chunked prefill and cuda graphs and a long name"
        )
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    for figure in ("itl_by_concurrency", "itl_of_layouts"):
        assert clashes(draw(m, spec(figure, width="column"))) == []


def test_all_failed_is_not_zero() -> None:
    found = tables(layouts=("agg-tp4", "pd-tp2"))
    dead = "pd-tp2-0a0a0a0a/long-0b0b0b0b/c32/0-0"
    found["cells"].loc[found["cells"]["cell_id"] == dead, "verdict"] = "invalid"
    found["requests"].loc[found["requests"]["cell_id"] == dead, "ok"] = False
    found["tokens"].loc[found["tokens"]["cell_id"] == dead, "ok"] = False
    m = Measured.from_frames(found["cells"], found["requests"], found["tokens"], found["checks"])
    drawn = draw(m, spec("itl_of_layouts"))
    rows = drawn.data[drawn.data["layout"] == "pd-tp2"]
    assert rows["what"].tolist() == ["nothing"]
    assert rows["x_ms"].isna().all()
    assert any("INVALID" in text and "0 req" in text for text in texts(drawn.figure))


def test_totals_only_says_what_to_do() -> None:
    found = tables()
    m = Measured.from_frames(found["cells"], found["requests"].iloc[:0], found["tokens"].iloc[:0])
    with pytest.raises(UserError, match="save-detailed"):
        draw(m, spec("itl_by_concurrency"))


@pytest.mark.parametrize(
    ("window", "says"),
    [
        ({"x_min_ms": 9, "x_max_ms": 3}, "x_min_ms (9) must be below x_max_ms (3)"),
        ({"y_min": 0.9, "y_max": 0.5}, "y_min (0.9) must be below y_max (0.5)"),
        ({"x_min_ms": 0, "x_scale": "log"}, "above 0 on a logarithmic axis"),
        ({"x_max": 3}, "Extra inputs"),
    ],
)
def test_senseless_windows_are_refused(window: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError) as error:
        Window.model_validate(window)
    assert says in str(error.value)
    with pytest.raises(ValidationError, match="in percent"):
        spec("itl_of_layouts", percentiles=[0])
