# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of the tables, each case in a process of its own; peers run in turn on the same file."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of processor time and of the clock."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ingest(scratch: Path, megabytes: float, rounds: int) -> list[str]:
    """Our ingest beside four peers on one file, in turn; the best round of each counts."""
    import numpy as np
    import orjson
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq
    from result_files import write_result

    from splitbench.tables.ingest import ingest_cell

    raw = scratch / "result.json"
    tokens = write_result(raw, megabytes)
    size = raw.stat().st_size / 1e6

    def json_and_pandas() -> None:
        data = json.loads(raw.read_text())
        frame = pd.DataFrame({key: value for key, value in data.items() if isinstance(value, list)})
        frame.explode("itls").astype({"itls": float}).to_parquet(scratch / "pandas.parquet")

    def orjson_and_numpy() -> None:
        data = orjson.loads(raw.read_bytes())
        lengths = [len(gaps) for gaps in data["itls"]]
        values = np.concatenate([np.array(gaps) for gaps in data["itls"]])
        table = pa.table({"request": np.repeat(np.arange(len(lengths)), lengths), "itl_s": values})
        pq.write_table(table, scratch / "orjson.parquet")

    cases: dict[str, Callable[[], Any]] = {
        "splitbench ingest": lambda: ingest_cell(raw, {"cell_id": "a/b/c32/1-1"}, scratch / "cell"),
        "json + pandas explode": json_and_pandas,
        "json alone": lambda: json.loads(raw.read_bytes()),
        "orjson alone": lambda: orjson.loads(raw.read_bytes()),
        "orjson + numpy + Parquet": orjson_and_numpy,
    }
    best = {name: (float("inf"), float("inf")) for name in cases}
    for _ in range(rounds):
        for name, work in cases.items():
            best[name] = min(best[name], timed(work))
    slowest = best["json + pandas explode"][0]
    lines = [
        f"ingest: one file of {size:.0f} MB, {tokens:,} ITLs, best of {rounds} rounds in turn",
        "",
        "| way | MB per s and core | MB per s by the clock | x json + pandas |",
        "|---|---|---|---|",
    ]
    for name, (cpu, wall) in best.items():
        lines.append(f"| {name} | {size / cpu:.0f} | {size / wall:.0f} | {slowest / cpu:.1f} |")
    return lines


def ingest_memory(scratch: Path, megabytes: float) -> list[str]:
    """Peak memory of one ingest (in this process, which does nothing else)."""
    from result_files import write_result

    from splitbench.tables.ingest import ingest_cell

    small, large = scratch / "small.json", scratch / "large.json"
    write_result(small, 1)
    write_result(large, megabytes)
    ingest_cell(small, {"cell_id": "small"}, scratch / "small")
    before = peak_mib()
    ingest_cell(large, {"cell_id": "large"}, scratch / "large")
    return [
        f"ingest: peak memory {before:.0f} MiB after a 1 MB file, {peak_mib():.0f} after {megabytes:.0f} MB"
    ]


def memory(scratch: Path, cells: int) -> list[str]:
    """Peak memory while more and more cells are ingested in one process, and while another reads them."""
    from result_files import write_result

    from splitbench.tables.ingest import ingest_cell

    raw = scratch / "small.json"
    write_result(raw, 0.02, output_tokens=64)
    lines = ["memory: peak while cells are ingested one after the other", "", "| cells | MiB |", "|---|---|"]
    for n in range(cells):
        ingest_cell(raw, {"cell_id": f"a/b/c1/1-{n}", "restart": 1, "repeat": n}, scratch / "cells" / str(n))
        if n + 1 in (10, 100, 1_000, 10_000):
            lines.append(f"| {n + 1:,} | {peak_mib():.0f} |")
    lines += [
        "",
        "memory: peak while their ITLs are read for P50 and P99",
        "",
        "| cells | MiB |",
        "|---|---|",
    ]
    for count in (10, 100, 1_000, 10_000):
        if count <= cells:
            lines.append(f"| {count:,} | {_in_process('_read', scratch / 'cells', count)[0]} |")
    return lines


def _read(folder: Path, cells: float) -> list[str]:
    from splitbench.statistics.quantiles import quantiles
    from splitbench.tables import dataset

    parts = [folder / str(n) for n in range(int(cells))]
    quantiles(dataset.itl_chunks(parts), [0.5, 0.99])
    return [f"{peak_mib():.0f}"]


def itl(scratch: Path, millions: float) -> list[str]:
    """Exact quantiles and ECDF of many ITLs on disk."""
    import numpy as np

    from splitbench.tables.cellwriter import Requests, write_cell

    rng = np.random.default_rng(1)
    parts = []
    for k in range(int(millions)):
        values = rng.gamma(30, 0.0003, (1000, 1000))
        lengths = np.full(1000, 1000)
        parts.append(scratch / "itl" / str(k))
        write_cell(
            Requests(np.ones(1000, np.bool_)),
            lambda v=values, n=lengths: [(v.ravel(), n)],
            {"cell_id": f"a/b/c1/1-{k}"},
            parts[-1],
        )
    ours = _in_process("_quantiles", scratch / "itl", millions)
    return [*ours, f"itl: numpy.quantile of the same values, all in memory: {_whole(parts)}"]


def _quantiles(folder: Path, millions: float) -> list[str]:
    from splitbench.statistics.quantiles import Distribution
    from splitbench.tables import dataset

    parts = [folder / str(k) for k in range(int(millions))]
    before = peak_mib()
    wall, cpu = time.perf_counter(), time.process_time()
    distribution = Distribution(dataset.itl_chunks(parts))
    values = distribution.quantiles([0.5, 0.9, 0.99, 0.999])
    curve = distribution.ecdf
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return [
        f"itl: {distribution.n:,} ITLs, P50 P90 P99 P99.9 = {', '.join(f'{v:.3f}' for v in values)} ms, "
        f"ECDF of {len(curve.x):,} points: {cpu:.2f} s of processor time, {wall:.2f} s by the clock; "
        f"peak {peak_mib() - before:.0f} MiB above the imports (all values: {8 * distribution.n >> 20} MiB)"
    ]


def _whole(parts: list[Path]) -> str:
    import numpy as np

    from splitbench.tables import dataset

    values = dataset.itl_values(parts)
    cpu, wall = timed(lambda: np.quantile(values, [0.5, 0.9, 0.99, 0.999]))
    return f"{cpu:.2f} s of processor time, {wall:.2f} s by the clock, the reading left out"


CASES: dict[str, tuple[Callable[..., list[str]], tuple[float, ...]]] = {
    "ingest": (ingest, (110, 7)),
    "ingest_memory": (ingest_memory, (440,)),
    "memory": (memory, (10_000,)),
    "itl": (itl, (50,)),
}
_INNER: dict[str, Callable[..., list[str]]] = {"_read": _read, "_quantiles": _quantiles}


def _in_process(name: str, folder: Path, *numbers: float) -> list[str]:
    command = [sys.executable, __file__, "--inner", name, str(folder), *map(str, numbers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def main() -> None:
    """Run the named cases, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)}; all if none")
    parser.add_argument("--small", action="store_true", help="a hundredth of the size, to see that it works")
    parser.add_argument("--scratch", type=Path, help="folder for the files (default: a temporary one)")
    parser.add_argument("--inner", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        name, folder, *numbers = args.inner
        work = _INNER[name] if name in _INNER else CASES[name][0]
        values = [int(float(v)) if float(v).is_integer() else float(v) for v in numbers]
        print("\n".join(work(Path(folder), *values)))
        return
    for name in args.cases or CASES:
        sizes = CASES[name][1]
        if args.small:
            sizes = tuple(max(2.0, s / 100) for s in sizes)
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            print("\n".join(_in_process(name, Path(scratch), *sizes)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
