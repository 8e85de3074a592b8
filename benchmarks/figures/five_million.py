# SPDX-License-Identifier: Apache-2.0
"""How long a figure of millions of ITLs takes, from Parquet to files, beside matplotlib drawing every sample.

    python benchmarks/figures/five_million.py [--itls 5000000] [--folder FOLDER]

Prints CPU and wall seconds of each stage (the best of three rounds) and the ratio to the peer (`Axes.ecdf`, all
samples, in the same run), after checking that the drawn curves are exact: the largest samples are all there and
every corner has its exact share.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from splitbench.figures.ecdf import TAIL
from splitbench.figures.gallery import FigureSpec, Measured, draw, lineage, write_figure
from splitbench.tables.parts import write_part
from splitbench.tables.schema import TABLES

T = TypeVar("T")
LOADS = (1, 2, 4, 8, 16, 32)
ANSWER = 1023
ROUNDS = 3


def timed(name: str, work: Callable[[], T], rounds: int = 1) -> tuple[T, float]:
    """The result and the CPU seconds of the best round: other processes make a round slower, never faster."""
    best = (float("inf"), float("inf"))
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        best = min(best, (time.process_time() - cpu, time.perf_counter() - wall))
    print(f"{name:<46} {best[0]:7.2f} s CPU {best[1]:7.2f} s wall")
    return result, best[0]


def make_parts(folder: Path, itls: int) -> list[Path]:
    """Two layouts at six concurrencies, requests in proportion to concurrency, the given ITLs in all."""
    random = np.random.default_rng(7)
    unit = itls / (2 * sum(LOADS) * ANSWER)
    folders = []
    for layout, kind in (("agg-tp4", "aggregated"), ("pd-tp2", "pd")):
        for load in LOADS:
            n = max(1, round(unit * load))
            cell_id = f"{layout}-00000000/long-00000000/c{load}/0-0"
            facts: dict[str, Any] = {
                "cell_id": cell_id,
                "layout": layout,
                "kind": kind,
                "first_token": "prefiller" if kind == "pd" else None,
                "budget_kind": "gpus",
                "budget": 4,
                "workload": "long",
                "concurrency": load,
                "restart": 0,
                "repeat": 0,
                "verdict": "ok",
                "cell_digest": "0" * 64,
            }
            itl = 7 * random.lognormal(0, 0.08, n * ANSWER)
            stalls = random.random(itl.size) < (load / 800 if kind == "aggregated" else load / 8000)
            itl[stalls] += random.exponential(80 if kind == "aggregated" else 5, int(stalls.sum()))
            where = folder / cell_id
            folders.append(where)
            write_part("cells", [facts], where, facts)
            requests = [
                {"request": i, "ok": True, "start_s": i * 0.1, "ttft_ms": 100.0, "second_token_ms": 107.0}
                for i in range(n)
            ]
            write_part("requests", requests, where, facts)
            tokens = pa.table(
                {
                    "cell_id": pa.DictionaryArray.from_arrays(np.zeros(itl.size, np.int32), [cell_id]),
                    "request": np.repeat(np.arange(n, dtype=np.int32), ANSWER),
                    "position": np.tile(np.arange(1, ANSWER + 1, dtype=np.int32), n),
                    "itl_ms": itl,
                    "ok": np.ones(itl.size, bool),
                },
                schema=TABLES["tokens"].schema,
            )
            write_part("tokens", tokens, where, facts)
    return folders


def check(measured: Measured, data: pd.DataFrame) -> None:
    """Brute force over all samples: no corner is off, none of the largest samples is missing."""
    for cell in measured.cells.to_dict("records"):
        values, _ = measured.values(str(cell["cell_id"]), "itl_ms")
        mine = (data["layout"] == cell["layout"]) & (data["concurrency"] == cell["concurrency"])
        curve = data[mine & (data["what"] == "curve")]
        x = curve["x_ms"].to_numpy()
        assert np.array_equal(
            curve["share"].to_numpy(), np.searchsorted(values, x, side="right") / values.size
        )
        assert np.isin(values[-TAIL:], x).all()


def peer(measured: Measured) -> None:
    """Every sample drawn, one PNG of the same size."""
    figure = Figure(figsize=(3.5, 5))
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, sharex=True, sharey=True)
    for ax, layout in zip(axes, ("agg-tp4", "pd-tp2"), strict=True):
        for cell in measured.cells[measured.cells["layout"] == layout]["cell_id"]:
            ax.ecdf(measured.tokens(cell).itl_ms)
        ax.set_xscale("log")
    with tempfile.TemporaryFile() as file:
        figure.savefig(file, dpi=300)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--itls", type=int, default=5_000_000)
    parser.add_argument("--folder", type=Path, help="keep the parts and figures here")
    arguments = parser.parse_args()
    spec = FigureSpec(figure="itl_by_concurrency", workload="long")
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folders = make_parts(folder / "cells", arguments.itls)
        measured, _ = timed("open the cells", lambda: Measured.from_folders(folders))
        rows = sum(measured.tokens(cell).itl_ms.size for cell in measured.cells["cell_id"])
        print(f"{rows:,} ITLs in {len(folders)} cells")
        # The first figure of a process also loads fonts; a second one shows the figure itself.
        draw(measured, FigureSpec(figure="itl_by_concurrency", workload="long", concurrencies=(1,)))
        fresh = lambda: draw(Measured.from_folders(folders), spec)  # noqa: E731 - nothing read before counts
        drawn, draw_s = timed("read the tokens and draw", fresh, ROUNDS)
        facts = lineage(drawn, measured, experiment="benchmark")
        with tempfile.TemporaryFile() as file:
            _, png_s = timed("one PNG", lambda: drawn.figure.savefig(file, dpi=300), ROUNDS)
        stem = folder / "itl-by-concurrency"
        _, all_s = timed(
            "write PNG, PDF, SVG, CSV and sidecar", lambda: write_figure(drawn, stem, facts), ROUNDS
        )
        check(measured, drawn.data)
        print(f"exact: {len(drawn.data):,} rows drawn, the {TAIL:,} largest samples of every line among them")
        _, peer_s = timed("peer: every sample, one PNG", lambda: peer(measured))
        for form, seconds in (("one PNG", png_s), ("all forms", all_s)):
            total = draw_s + seconds
            print(f"figure in {form}: {total:.2f} s CPU, {peer_s / total:.1f} times faster than the peer")


if __name__ == "__main__":
    main()
