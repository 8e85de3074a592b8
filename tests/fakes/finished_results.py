# SPDX-License-Identifier: Apache-2.0
"""Results of an experiment as a finished run leaves them, from generated measurements: no engine, no snakemake."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from splitbench.experiment.cells import Cell
from splitbench.figures.stage import write_one_figure
from splitbench.files import digest, read_json, sha256_file, write_json, write_text
from splitbench.measuring.run import CellFiles
from splitbench.report.stage import write_page
from splitbench.statistics.stage import write_statistics
from splitbench.tables.stage import write_cell_part, write_symmetry, write_tables
from splitbench.workflow import Workflow

CONFIG = "experiment.yaml"


def small_config() -> dict[str, Any]:
    """Two layouts, one workload, two loads; the stack is one that nobody builds."""
    return {
        "experiment": "tiny",
        "title": "Generated measurements",
        "stack": {"name": "made", "python": "envs/made/bin/python", "packages": {"vllm": "0.32.0"}},
        "model": {"name": "made", "synthetic": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2}},
        "layouts": {
            "agg": {"kind": "aggregated", "cores": [0]},
            "pd": {"kind": "pd", "connector": "nixl", "prefill": {"cores": [0]}, "decode": {"cores": [1]}},
        },
        "workloads": {"long": {"input_tokens": 64, "output_tokens": 8, "prompts": {"per_concurrency": 4}}},
        "matrix": {"concurrency": [1, 2]},
        "slo": {"itl_ms": 50, "percentile": 99},
        "figures": {"itl_by_concurrency": {}, "ttft_of_layouts": {}},
    }


def bench_json(cell: Cell, requests: int, tokenizer: str, seed: int, slower: float = 1.0) -> str:
    """What `vllm bench serve --save-detailed` writes, with seeded latencies."""
    rng = np.random.default_rng(seed)
    tokens = int(cell.load["output_tokens"])
    ttfts = slower * (rng.gamma(4, 0.02, requests) + 0.05)
    itls = slower * (rng.gamma(30, 0.0005, (requests, tokens - 1)) + 0.002 * cell.concurrency)
    return json.dumps(
        {
            "date": "20260101-000000",
            "endpoint_type": "openai",
            "backend": "openai",
            "label": None,
            "model_id": "made",
            "tokenizer_id": tokenizer,
            "num_prompts": requests,
            "request_rate": "inf",
            "burstiness": 1.0,
            "max_concurrency": cell.concurrency,
            "duration": 10.0,
            "completed": requests,
            "failed": 0,
            "total_input_tokens": int(cell.load["input_tokens"]) * requests,
            "total_output_tokens": tokens * requests,
            "request_throughput": 1.0,
            "input_lens": [int(cell.load["input_tokens"])] * requests,
            "output_lens": [tokens] * requests,
            "ttfts": ttfts.tolist(),
            "itls": itls.tolist(),
            "start_times": np.sort(rng.random(requests) * 10).tolist(),
            "generated_texts": [""] * requests,
            "errors": [""] * requests,
        }
    )


def finish(
    folder: Path,
    config: Mapping[str, Any],
    *,
    root: Path,
    tokenizer: str = "/srv/models/made",
    log: str = "engine up\n",
    slower: float = 1.0,
    machine: Mapping[str, Any] | None = None,
    text: str | None = None,
    argv: tuple[str, ...] = (),
) -> Workflow:
    """Write everything that `snakemake` would have left below `folder`, and the config beside it.

    Args:
        folder: the working folder.
        config: the experiment.
        root: the repository of the workflow.
        tokenizer: what the client's file and command line name.
        log: text of every engine's log.
        slower: factor on all latencies.
        machine: further facts of the machine's record.
        text: the config's own text; default: a dump.
        argv: further arguments in the client's command line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONFIG, text if text is not None else yaml.safe_dump(dict(config), sort_keys=False))
    flow = Workflow(config, [Path(CONFIG)], root)
    with chdir(folder):
        probe = _environment(flow, machine or {})
        for cell in flow.cells.all:
            _cell(flow, cell, probe, tokenizer, log, slower, argv)
        _derived(flow, probe)
    return flow


def _environment(flow: Workflow, machine: Mapping[str, Any]) -> Path:
    serving = {
        "stack": flow.stack,
        "key": flow.stack_key,
        "packages": {"vllm": "0.32.0", "opencv": "5.0.0.93"},
    }
    write_json(Path(flow.path(f"environment/serving-{flow.stack_key}.json")), serving)
    probe = Path(flow.path(f"environment/probe-{flow.stack_key}.json"))
    facts = {
        "system": {"os": "Debian", "kernel": "6.1", "architecture": "x86_64", "python": "3.11"},
        "cpu": {"model": "made", "cores_usable": [0, 1]},
        "memory": {"total_bytes": 1 << 34},
        "gpus": [],
        "environment": {},
        **machine,
    }
    write_json(probe, {"machine": facts, "serving": serving})
    row = {"streams": 4, "itl_error_p50_ms": 0.2, "itl_error_p99_ms": 2.0, "itl_error_max_ms": 3.0}
    row |= {"ttft_error_p50_ms": 1.0, "ttft_error_max_ms": 4.0, "merged_percent": 0.0}
    floor = {"interval_ms": 20.0, "tokens": 64, "others_cpu_percent": 3.0, "rows": [row]}
    write_json(Path(flow.floor_path), floor)
    check = {"expectations": [], "findings": [], "went_on": False, "stack": None}
    write_json(Path(flow.path(f"environment/check-{flow.stack_key}.json")), check)
    write_json(Path(flow.path(f"models/{flow.model_key}.json")), {"model": flow.model, "key": flow.model_key})
    return probe


def _cell(
    flow: Workflow, cell: Cell, probe: Path, tokenizer: str, log: str, slower: float, argv: tuple[str, ...]
) -> None:
    files = CellFiles(Path(flow.path(f"cells/{cell.cell_id}")))
    session = Path(flow.path(f"logs/sessions/{cell.layout_key}/{cell.layout}.r{cell.restart}.made"))
    write_text(session / "engine-0.log", log)
    write_json(session / "session.json", {"id": "made", "layout": cell.layout, "front": ["127.0.0.1", 18100]})
    write_text(Path(flow.path(f"logs/cells/{cell.cell_id}.log")), f"cell {cell.cell_id}\n")
    order = flow.cells.order(cell.cell_id)
    write_text(files.bench, bench_json(cell, cell.prompts, tokenizer, 1000 + order, slower))
    write_json(files.slice, cell.slice | {"digest": cell.digest, "experiment": cell.experiment})
    engines = {engine.name: {"role": engine.role, "before": {}, "after": {}} for engine in cell.plan.engines}
    write_json(files.metrics, engines)
    write_json(
        files.engine_facts,
        {"engines": {name: {"role": e["role"], "facts": {}} for name, e in engines.items()}},
    )
    write_json(files.status, {"status": "completed", "cell_digest": cell.digest})
    write_json(files.telemetry, {"series": [], "ticks": [], "foreign": [], "clock_start_s": 0.0})
    logs = {name: {"role": engine["role"], "start": log, "cell": ""} for name, engine in engines.items()}
    files.logs.write_bytes(gzip.compress(json.dumps(logs).encode(), mtime=0))
    record = {
        "cell_id": cell.cell_id,
        "cell_digest": cell.digest,
        "order": order,
        "started_at": f"2026-01-01T00:{order // 60:02}:{order % 60:02}.000+00:00",
        "ended_at": f"2026-01-01T01:{order // 60:02}:{order % 60:02}.000+00:00",
        "duration_s": 10.0,
        "total_s": 12.0,
        "prompts": cell.prompts,
        "warmups": cell.warmups,
        "seed": cell.seed,
        "warmup_seed": cell.seed ^ 1,
        "session": {
            "id": "made",
            "restart": cell.restart,
            "reused": False,
            "age_s": 1.0,
            "folder": str(Path("../" * 5) / session.relative_to(flow.results)),
        },
        "client": {"argv": ["vllm", "bench", "serve", "--tokenizer", tokenizer, *argv], "seconds": 10.0},
        "completed": cell.prompts,
        "bench_sha256": sha256_file(files.bench),
        "environment_digest": digest(read_json(probe)),
        "code_version": "0.1.0",
    }
    write_json(files.record, record)


def _derived(flow: Workflow, probe: Path) -> None:
    parts = [Path(flow.path(f"parts/{cell}")) for cell in flow.cells.ids]
    for cell, folder in zip(flow.cells.ids, parts, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        write_cell_part(flow, cell, folder)
    names = ("cells.parquet", "checks.parquet", "parts.json")
    cells, checks, listing = (Path(flow.path(f"tables/{name}")) for name in names)
    write_tables(parts, cells, checks, listing)
    symmetry = Path(flow.path("tables/symmetry.json"))
    write_symmetry(flow, symmetry)
    statistics = Path(flow.path("statistics.json"))
    sections = {name: json.loads(flow.section(name)) for name in ("slo", "margin_percent", "claims")}
    found = read_json(symmetry)["differences"]
    write_statistics(cells, parts, sections.pop("slo"), statistics, asymmetries=found, **sections)
    for layout in flow.experiment.layouts:
        write_json(Path(flow.path(f"plans/{layout}.json")), json.loads(flow.plan_text(layout)))
    for name in flow.figure_names:
        write_one_figure(flow, name, parts, Path(flow.path(f"figures/{name}")))
    check = Path(flow.path(f"environment/check-{flow.stack_key}.json"))
    write_page(
        flow, parts, probe, check, statistics, f"--configfile {CONFIG}", Path(flow.path("report.html"))
    )
