# SPDX-License-Identifier: Apache-2.0
"""The client's command line: what `vllm bench serve` is told for a cell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitbench.experiment.cells import Cell
from splitbench.serving.render import flags

# Only decides what the client prints; every percentile we show is computed from the detailed result.
PRINTED_PERCENTILES = "50,90,99"


def bench_command(
    cell: Cell,
    *,
    base_url: str,
    tokenizer: str,
    prompts: int,
    seed: int,
    result: Path | None,
    dataset: Path | None = None,
) -> list[str]:
    """Arguments after `vllm` for one run of the client.

    Args:
        cell: gives workload, lengths and concurrency.
        base_url: the session's front door.
        tokenizer: folder or hub name of the model.
        prompts: number of requests.
        seed: of the prompts.
        result: where the client writes its JSON; None for a warm-up whose figures nobody wants. A warm-up's prompts
            are made up: of a file no second set can be had that surely differs from the first.
        dataset: the file of prompts, where the dataset is one.

    Returns:
        argv without the program's name, starting with `bench serve`.
    """
    load = cell.load
    argv = [
        *("bench", "serve"),
        *("--backend", "openai", "--base-url", base_url, "--endpoint", "/v1/completions"),
        *("--model", cell.plan.served_model, "--tokenizer", tokenizer),
        *(_dataset(load, dataset) if result is not None else _random(load)),
        # The random dataset sets this by itself only in newer versions.
        "--ignore-eos",
        *("--num-prompts", str(prompts), "--max-concurrency", str(cell.concurrency)),
        *(_arrival(load) if result is not None else ["--request-rate", "inf"]),
        *("--seed", str(seed), "--temperature", "0"),
        # Our own readiness is stricter, and the client's check would send a measured prompt beforehand.
        *("--ready-check-timeout-sec", "0", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", PRINTED_PERCENTILES),
        *flags(load["extra_args"]),
    ]
    if result is not None:
        argv += ["--save-result", "--save-detailed"]
        argv += ["--result-dir", str(result.parent), "--result-filename", result.name]
    return argv


def _random(load: Mapping[str, Any]) -> list[str]:
    shared = int(load.get("prefix_tokens", 0)) if load["dataset"] == "random" else 0
    argv = ["--dataset-name", "random", "--random-input-len", str(int(load["input_tokens"]) - shared)]
    argv += ["--random-output-len", str(load["output_tokens"])]
    argv += ["--random-range-ratio", f"{load.get('range_ratio', 0):g}"]
    return [*argv, "--random-prefix-len", str(shared)] if shared else argv


def _dataset(load: Mapping[str, Any], path: Path | None) -> list[str]:
    kind = load["dataset"]
    if kind == "random":
        return _random(load)
    if kind == "prefix-repetition":
        shared = int(load.get("prefix_tokens", 0))
        return [
            *("--dataset-name", "prefix_repetition"),
            *("--prefix-repetition-prefix-len", str(shared)),
            *("--prefix-repetition-suffix-len", str(int(load["input_tokens"]) - shared)),
            *("--prefix-repetition-num-prefixes", str(load["prefixes"])),
            *("--prefix-repetition-output-len", str(load["output_tokens"])),
        ]
    if kind == "sharegpt":
        return ["--dataset-name", "sharegpt", "--dataset-path", str(path)]
    argv = ["--dataset-name", "custom", "--dataset-path", str(path), "--skip-chat-template"]
    return [*argv, "--custom-output-len", str(load["output_tokens"])]


def _arrival(load: Mapping[str, Any]) -> list[str]:
    ramp, rate = load.get("ramp"), load.get("request_rate")
    if ramp is not None:
        argv = ["--ramp-up-strategy", ramp["strategy"]]
        # The client takes whole numbers of requests per second here.
        argv += [
            "--ramp-up-start-rps",
            f"{ramp['start_rate']:g}",
            "--ramp-up-end-rps",
            f"{ramp['end_rate']:g}",
        ]
    elif rate is not None:
        argv = ["--request-rate", f"{rate:g}"]
    else:
        return ["--request-rate", "inf"]
    return [*argv, "--burstiness", f"{load.get('burstiness', 1.0):g}"]
