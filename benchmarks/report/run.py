# SPDX-License-Identifier: Apache-2.0
"""How long the whole report of a reference-size matrix takes: statistics, figures and page from Parquet parts.

    python benchmarks/report/run.py [--figures all] [--folder FOLDER] [--limit 60]

48 cells of the reference experiment (4 layouts x 2 workloads x 6 loads, 10 requests per unit of concurrency, 1,024
tokens each: 5 million ITLs) are made up, then each job runs in a process of its own, two at a time, as snakemake with
two cores runs them. Exits with 1 above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from splitbench.experiment.load import read_yaml
from splitbench.figures.gallery import FIGURE_NAMES
from splitbench.tables.parts import write_part
from splitbench.tables.schema import TABLES
from splitbench.workflow import Workflow

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "config" / "experiments" / "sakura-h100.yaml"
LAYOUTS = ("agg-tp4", "pd-tp2", "agg-tp8", "pd-tp4")  # those that the source measured
ALL = [name for name in FIGURE_NAMES if name not in ("telemetry", "handoff_gap_by_concurrency")]
MACHINE = {
    "serving": {"packages": {"vllm": "0.11.0"}},
    "machine": {
        "system": {"os": "made up", "kernel": "0", "architecture": "x86_64"},
        "cpu": {"model": "made up", "cores_usable": [0, 1]},
        "memory": {"total_bytes": 2**35},
        "gpus": [],
    },
}

CHECK = {"went_on": False, "stack": "made up", "expectations": [], "findings": []}


def config(figures: str) -> dict[str, Any]:
    """The reference experiment, with all figures where asked."""
    read = read_yaml(CONFIG)
    read["layouts"] = {name: read["layouts"][name] for name in LAYOUTS}
    if figures == "all":
        read["figures"] = {name: {} for name in ALL} | read["figures"]
    return read


def make_cell(flow: Workflow, cell_id: str, folder: Path) -> dict[str, Any]:
    """Parts of one cell: aggregated ITLs stall more the more load and prompt there is, PD's hardly."""
    cell = flow.cells[cell_id]
    plan, n, answer = cell.plan, cell.prompts, int(cell.load["output_tokens"])
    random = np.random.default_rng(cell.seed)
    long = int(cell.load["input_tokens"]) > 4096
    itl = (7 + plan.budget.count / 8) * random.lognormal(0, 0.08, n * (answer - 1))
    share = cell.concurrency / (1600 if plan.kind == "pd" else 800 if long else 4000)
    stalled = random.random(itl.size) < share
    itl[stalled] += random.exponential(4 if plan.kind == "pd" else 90, int(stalled.sum()))
    prefill = (400 if long else 60) * 4 / plan.budget.count
    ttft = prefill * (1 + random.integers(0, cell.concurrency, n)) * random.lognormal(0, 0.04, n)
    per_request = itl.reshape(n, -1)
    e2e = ttft + per_request.sum(axis=1)
    row = {
        "cell_id": cell_id,
        "experiment": cell.experiment,
        "layout": cell.layout,
        "kind": plan.kind,
        "connector": plan.connector,
        "first_token": plan.first_token,
        "budget_kind": plan.budget.kind,
        "budget": plan.budget.count,
        "workload": cell.workload,
        "input_tokens_asked": int(cell.load["input_tokens"]),
        "output_tokens_asked": answer,
        "concurrency": cell.concurrency,
        "restart": cell.restart,
        "repeat": cell.repeat,
        "duration_s": float(e2e.sum() / 1000 / cell.concurrency),
        "requests_asked": n,
        "requests_completed": n,
        "verdict": "ok",
        "cell_digest": cell.digest,
        "code_version": "0",
    }
    write_part("cells", [row], folder, row)
    checks = [{"check": "completion", "outcome": "ok", "reason": ""}]
    write_part("checks", checks, folder, row)
    facts = [{"engine": "engine-0", "role": plan.kind, "fact": "enforce_eager", "value": "false"}]
    write_part("engine_facts", facts, folder, row)
    requests = {
        "request": np.arange(n, dtype=np.int32),
        "ok": np.ones(n, bool),
        "start_s": np.arange(n) * float(e2e.mean()) / 1000 / cell.concurrency,
        "ttft_ms": ttft,
        "second_token_ms": ttft + per_request[:, 0],
        "e2e_ms": e2e,
        "itl_p99_ms": np.quantile(per_request, 0.99, axis=1),
        "handoff_gap_ms": per_request[:, 0] - np.median(per_request, axis=1),
        "itls": np.full(n, answer - 1, np.int32),
        "output_tokens": np.full(n, answer, np.int32),
    }
    write_part("requests", pd.DataFrame(requests).to_dict("records"), folder, row)
    tokens = {
        "cell_id": pa.array([cell_id] * itl.size).dictionary_encode(),
        "request": np.repeat(np.arange(n, dtype=np.int32), answer - 1),
        "position": np.tile(np.arange(1, answer, dtype=np.int32), n),
        "itl_ms": itl,
        "ok": np.ones(itl.size, bool),
    }
    table = TABLES["tokens"]
    pq.write_table(pa.table(tokens, schema=table.schema), folder / table.file, compression="zstd")
    return row


def job(name: str, folder: Path, figures: str) -> None:
    """One job of the workflow, in the process that it is called in."""
    from splitbench.figures.stage import write_one_figure
    from splitbench.report.stage import write_page
    from splitbench.statistics.stage import write_statistics
    from splitbench.tables.stage import read_listing

    os.chdir(folder)
    flow = Workflow(config(figures), [CONFIG], REPOSITORY)
    parts = read_listing(folder / "parts.json")
    statistics = folder / "statistics.json"
    if name == "statistics":
        sections = {key: json.loads(flow.section(key)) for key in ("slo", "margin_percent", "claims")}
        slo = sections.pop("slo")
        write_statistics(folder / "cells.parquet", parts, slo, statistics, **sections)
    elif name == "report":
        records = folder / "probe.json", folder / "check.json"
        write_page(flow, parts, *records, statistics, "", folder / "report.html")
    else:
        write_one_figure(flow, name, parts, Path(flow.path(f"figures/{name}")))


def run(names: list[str], folder: Path, figures: str) -> None:
    """Jobs two at a time, each in a process of its own."""
    waiting, going = deque(names), {}
    while waiting or going:
        while waiting and len(going) < 2:
            name = waiting.popleft()
            command = [sys.executable, __file__, "--job", name, "--folder", str(folder), "--figures", figures]
            going[name] = subprocess.Popen(command), time.perf_counter()
        time.sleep(0.01)
        for name, (process, begun) in list(going.items()):
            if (code := process.poll()) is not None:
                if code:
                    raise SystemExit(f"{name} failed")
                print(f"{name:<36} {time.perf_counter() - begun:6.2f} s")
                del going[name]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", choices=["reference", "all"], default="reference")
    parser.add_argument("--folder", type=Path, help="keep what is made here")
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        job(arguments.job, arguments.folder, arguments.figures)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        flow = Workflow(config(arguments.figures), [CONFIG], REPOSITORY)
        parts = [folder / "parts" / cell_id for cell_id in flow.cells.ids]
        if not (folder / "parts.json").exists():
            rows = [
                make_cell(flow, cell_id, part) for cell_id, part in zip(flow.cells.ids, parts, strict=True)
            ]
            pq.write_table(
                pa.Table.from_pylist(rows, schema=TABLES["cells"].schema), folder / "cells.parquet"
            )
            (folder / "probe.json").write_text(json.dumps(MACHINE))
            (folder / "check.json").write_text(json.dumps(CHECK))
            (folder / "parts.json").write_text(json.dumps({"parts": [str(part) for part in parts]}))
        begun = time.perf_counter()
        run(["statistics", *flow.figure_names], folder, arguments.figures)
        run(["report"], folder, arguments.figures)
        seconds = time.perf_counter() - begun
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"processor time of all jobs: {spent.ru_utime + spent.ru_stime:.1f} s")
        size = (folder / "report.html").stat().st_size / 1e6
        print(f"{len(flow.figure_names)} figures and the page ({size:.1f} MB): {seconds:.1f} s on 2 cores")
        if seconds > arguments.limit:
            raise SystemExit(f"above the limit of {arguments.limit:g} s")


if __name__ == "__main__":
    main()
