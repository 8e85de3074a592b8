# SPDX-License-Identifier: Apache-2.0
"""The client's command line: what `vllm bench serve` is told for a cell."""

from __future__ import annotations

from pathlib import Path

from splitbench.experiment.cells import Cell
from splitbench.serving.render import flags

# Only decides what the client prints; every percentile we show is computed from the detailed result.
PRINTED_PERCENTILES = "50,90,99"


def bench_command(
    cell: Cell, *, base_url: str, tokenizer: str, prompts: int, seed: int, result: Path | None
) -> list[str]:
    """Arguments after `vllm` for one run of the client.

    Args:
        cell: gives workload, lengths and concurrency.
        base_url: the session's front door.
        tokenizer: folder or hub name of the model.
        prompts: number of requests.
        seed: of the prompts.
        result: where the client writes its JSON; None for a warm-up whose figures nobody wants.

    Returns:
        argv without the program's name, starting with `bench serve`.
    """
    load = cell.load
    argv = [
        *("bench", "serve"),
        *("--backend", "openai", "--base-url", base_url, "--endpoint", "/v1/completions"),
        *("--model", cell.plan.served_model, "--tokenizer", tokenizer),
        *("--dataset-name", str(load["dataset"])),
        *("--random-input-len", str(load["input_tokens"]), "--random-output-len", str(load["output_tokens"])),
        *("--random-range-ratio", "0"),
        # The random dataset sets this by itself only in newer versions.
        "--ignore-eos",
        *("--num-prompts", str(prompts), "--max-concurrency", str(cell.concurrency)),
        *("--request-rate", "inf", "--seed", str(seed), "--temperature", "0"),
        # Our own readiness is stricter, and the client's check would send a measured prompt beforehand.
        *("--ready-check-timeout-sec", "0", "--num-warmups", "0", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", PRINTED_PERCENTILES),
        *flags(load["extra_args"]),
    ]
    if result is not None:
        argv += ["--save-result", "--save-detailed"]
        argv += ["--result-dir", str(result.parent), "--result-filename", result.name]
    return argv
