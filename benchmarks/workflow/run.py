# SPDX-License-Identifier: Apache-2.0
"""The whole workflow beside `vllm bench sweep serve` on the same engine and cells, and what planning costs.

    python benchmarks/workflow/run.py sweep                      # six cells on real engines, both arms in one run
    python benchmarks/workflow/run.py sweep --loads 1 2 4 8      # all of the demo's aggregated cells
    python benchmarks/workflow/run.py plan                       # snakemake -n from 16 to 1,600 cells

Both arms start from nothing but software and model: no engine is up, no result is there. Ours is the whole workflow,
from `snakemake` to figures and report; theirs is one `vllm bench sweep serve` with the same engine arguments, the same
client arguments and as many prompts, without warm-ups, checks, telemetry, tables, figures.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from splitbench.experiment.cells import Cell  # noqa: E402
from splitbench.measuring.command import bench_command  # noqa: E402
from splitbench.serving.plan import filled  # noqa: E402
from splitbench.workflow import Workflow, store  # noqa: E402

LAYOUT = "agg-2core"


def experiment(loads: Sequence[int], prompts: int | None) -> dict[str, Any]:
    """The demo with its aggregated layout alone."""
    config: dict[str, Any] = yaml.safe_load(
        (REPOSITORY / "config" / "config.yaml").read_text(encoding="utf-8")
    )
    config = copy.deepcopy(config)
    config["experiment"] = "sweep"
    config["layouts"] = {LAYOUT: config["layouts"][LAYOUT]}
    config["matrix"]["concurrency"] = list(loads)
    config.pop("claims", None)
    config["figures"].pop("break_even", None)  # needs two layouts
    if prompts is not None:
        for workload in config["workloads"].values():
            workload["prompts"] = {"per_concurrency": 1, "minimum": prompts}
    return config


def ours(config: dict[str, Any], folder: Path) -> dict[str, float]:
    """Run the workflow in an empty folder."""
    folder.mkdir()
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    state = folder / "state"
    state.mkdir(mode=0o700)
    environment = os.environ | {"SPLITBENCH_STATE": str(state), "SPLITBENCH_STORE": str(store())}
    argv = [
        *(str(Path(sys.executable).with_name("snakemake")), "--snakefile", str(REPOSITORY / "Snakefile")),
        *("--directory", str(folder), "--configfile", str(file), "--cores", "2"),
    ]
    began = time.time()
    with (folder / "run.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(argv, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    whole_s = time.time() - began
    if done.returncode:
        sys.exit((folder / "run.log").read_text(encoding="utf-8")[-3000:])
    results = folder / "results" / "sweep"
    figures = [path.stat().st_mtime for path in results.glob("figures/*.png")]
    return {"whole_s": whole_s, "first_figure_s": min(figures) - began} | cell_times(results, began)


def cell_times(results: Path, began: float) -> dict[str, float]:
    """Where the time of the cells went, from their records."""
    records = [json.loads(path.read_text()) for path in results.glob("cells/*/*/*/*/record.json")]
    records.sort(key=lambda record: str(record["started_at"]))
    begins = [_seconds(record["started_at"]) for record in records]
    ends = [begin + record["duration_s"] for begin, record in zip(begins, records, strict=True)]
    clients = sum(record["client"]["seconds"] for record in records)
    # From the end of one measured run to the begin of the next: the warm-up's run of the client is among it.
    between = [begin - end for begin, end in zip(begins[1:], ends[:-1], strict=True)]
    warm = [record["warmup_client_s"] for record in records[1:]]
    beside = [gap - own for gap, own in zip(between, warm, strict=True)]
    session_s = ends[-1] - (begins[0] - records[0]["session"]["age_s"])
    measured = sum(
        json.loads(path.read_text())["duration"] for path in results.glob("cells/*/*/*/*/bench.json")
    )
    return {
        "cells": float(len(records)),
        "until_first_client_s": begins[0] - began,
        "last_client_end_s": ends[-1] - began,
        "measured_clients_s": clients,
        "engine_ready_s": float(records[0]["session"]["times_s"]["ready"]),
        "overhead_median_s": statistics.median(beside),
        "overhead_max_s": max(beside),
        "warmup_median_s": statistics.median(warm),
        "share_measuring": measured / session_s,
        "share_clients": (clients + sum(warm)) / session_s,
    }


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def theirs(config: dict[str, Any], folder: Path) -> dict[str, float]:
    """Run `vllm bench sweep serve` on the same engine and cells."""
    folder.mkdir()
    flow = Workflow(config)
    values = {"serving_python": str(flow.serving_python), "model": flow.model_source}
    engine = filled(flow.cells.plans[LAYOUT], values)["engines"][0]
    vllm = str(flow.serving_python.with_name("vllm"))
    serve = [vllm, *engine["argv"][3:]]
    url = f"http://127.0.0.1:{engine['port']}"
    cells = sorted(flow.cells.all, key=lambda cell: flow.cells.order(cell.cell_id))
    arms = [_client(cell, url, flow.model_source) for cell in cells]
    common = [word for word in arms[0][0] if all(word in fixed for fixed, _ in arms)]
    params = folder / "cells.json"
    params.write_text(json.dumps([varied for _, varied in arms]), encoding="utf-8")
    argv = [
        *(vllm, "bench", "sweep", "serve", "--serve-cmd", shlex.join(serve)),
        *("--bench-cmd", shlex.join([vllm, *common]), "--bench-params", str(params)),
        *("--num-runs", "1", "--output-dir", str(folder), "--experiment-name", "sweep"),
    ]
    began = time.time()
    with (folder / "run.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            argv, env=os.environ | engine["env"], stdout=log, stderr=subprocess.STDOUT, check=False
        )
    whole_s = time.time() - began
    if done.returncode:
        sys.exit((folder / "run.log").read_text(encoding="utf-8")[-3000:])
    found = sorted(folder.glob("sweep/*/run=0.json"), key=lambda path: path.stat().st_mtime)
    ended = [path.stat().st_mtime for path in found]
    lasted = [json.loads(path.read_text())["duration"] for path in found]
    beside = [
        after - before - own for before, after, own in zip(ended[:-1], ended[1:], lasted[1:], strict=True)
    ]
    return {
        "whole_s": whole_s,
        "cells": float(len(found)),
        "last_client_end_s": ended[-1] - began,
        "beside_requests_median_s": statistics.median(beside),
        "share_measuring": sum(lasted) / whole_s,
    }


def _client(cell: Cell, url: str, model: str) -> tuple[list[str], dict[str, Any]]:
    """The client's arguments: what all cells share, and this cell's own, by name."""
    argv = bench_command(
        cell, base_url=url, tokenizer=model, prompts=cell.prompts, seed=cell.seed, result=Path("unused.json")
    )
    own = ("--random-input-len", "--random-output-len", "--num-prompts", "--max-concurrency", "--seed")
    varied: dict[str, Any] = {"_benchmark_name": cell.cell_id.replace("/", "-")}
    fixed: list[str] = []
    words = iter(argv)
    for word in words:
        if word in own:
            varied[word.removeprefix("--").replace("-", "_")] = next(words)
        elif word in ("--save-result", "--result-dir", "--result-filename", "--percentile-metrics"):
            if word != "--save-result":
                next(words)  # the sweep sets it itself
        else:
            fixed.append(word)
    return fixed, varied


def sweep(loads: Sequence[int], prompts: int | None, rounds: int, order: str) -> dict[str, Any]:
    """Both arms in turn; every round begins with the other one."""
    config = experiment(loads, prompts)
    arms = {"ours": ours, "theirs": theirs}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    names = order.split(",")
    with tempfile.TemporaryDirectory(prefix="sb-sweep-") as scratch:
        for turn in range(rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                found[name].append(arms[name](config, Path(scratch) / f"{name}{turn}"))
                print(name, json.dumps({key: round(value, 3) for key, value in found[name][-1].items()}))
    if all(found.values()):
        ratio = statistics.median(
            mine["whole_s"] / peer["whole_s"]
            for mine, peer in zip(found["ours"], found["theirs"], strict=True)
        )
        print(f"whole run, ours / theirs: {ratio:.2f}")
    return found


def plan(sizes: Sequence[int]) -> None:
    """Processor time and memory of `snakemake -n` against the number of cells."""
    print("cells  jobs  cpu_s  wall_s  peak_mib")
    for size in sizes:
        config = experiment((1, 2, 4, 8), None)
        config["matrix"]["repeats"] = max(1, size // 8)
        with tempfile.TemporaryDirectory(prefix="sb-plan-") as scratch:
            file = Path(scratch) / "experiment.yaml"
            file.write_text(yaml.safe_dump(config), encoding="utf-8")
            argv = [str(Path(sys.executable).with_name("snakemake")), "-n", "--quiet", "rules"]
            argv += ["--snakefile", str(REPOSITORY / "Snakefile"), "--directory", scratch]
            argv += ["--configfile", str(file), "--cores", "2"]
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            done = subprocess.run(argv, capture_output=True, text=True, check=True)
            wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        (total,) = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("total ")][:1]
        cells = 8 * config["matrix"]["repeats"]
        # Largest of all children so far; sizes grow.
        print(f"{cells:5d} {total:>5s} {cpu_s:6.2f} {wall_s:7.2f} {after.ru_maxrss / 1024:9.0f}")


def main() -> None:
    """Run a case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=("sweep", "plan"))
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 2, 4], help="concurrencies")
    parser.add_argument("--prompts", type=int, help="requests of every cell; default: as the demo")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--order", default="ours,theirs", help="which arms, in which order")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 80, 400, 1600], help="cells to plan")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    given = parser.parse_args()
    if given.case == "plan":
        plan(given.sizes)
        return
    found = sweep(given.loads, given.prompts, given.rounds, given.order)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
