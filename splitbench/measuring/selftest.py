# SPDX-License-Identifier: Apache-2.0
"""What the client itself adds to the latencies that it reports: rule `client_floor`, `splitbench selftest-client`.

`vllm bench serve` is run against an engine that streams at a steady pace and writes into each token when it was sent.
Both use one clock, so every reported gap has a true one beside it; the difference is the client's, and the measurement
floor: ITLs that are not well above it say more about the client than about the engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from splitbench.environment.stage import ensure_model, ensure_serving
from splitbench.errors import UserError
from splitbench.experiment.load import read_yaml
from splitbench.files import write_json
from splitbench.measuring import client_server
from splitbench.measuring.client import client_env, run_warm
from splitbench.measuring.telemetry import Sampler
from splitbench.serving.state import Owner, node_lock, state_folder
from splitbench.workflow import Workflow, say

HELP = "measure what the benchmark client itself adds to latencies, at 1 to 256 streams"
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
INTERVAL_MS = 20.0
TOKENS = 64
# Of one request alone a P99 would be its largest gap.
LEAST_REQUESTS = 3
START_LIMIT_S = 120.0
PACED_ENGINE = Path(__file__).with_name("paced_engine.py")
_STAMP_DIGITS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--configfile", type=Path, default=Path("config/config.yaml"))
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--interval-ms", type=float, default=INTERVAL_MS, help="true ITL of the engine")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="per answer")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and write the experiment's record of the client's floor."""
    flow = Workflow(read_yaml(arguments.configfile), [arguments.configfile])
    write_floor(
        flow,
        Path(flow.floor_path),
        say,
        streams=arguments.streams,
        tokens=arguments.tokens,
        interval_ms=arguments.interval_ms,
    )
    say(f"written to {flow.floor_path}; the next run of snakemake judges the cells by it")
    return 0


def write_floor(
    flow: Workflow,
    output: Path,
    note: Callable[[str], None],
    *,
    streams: Sequence[int],
    tokens: int = TOKENS,
    interval_ms: float = INTERVAL_MS,
) -> None:
    """Run the self-test with the node to itself and keep what it found.

    Args:
        flow: the experiment; its serving environment has the client.
        output: the record.
        note: takes lines for a person.
        streams: requests in flight.
        tokens: per answer.
        interval_ms: true gap between tokens.

    Raises:
        UserError: the environment can't be built, or the client failed.
    """
    ensure_serving(flow, note)
    ensure_model(flow, note)
    with node_lock(state_folder(), "the self-test of the client", note, owner=Owner.from_env(os.environ)):
        found = measure(
            flow.serving_python,
            flow.model_source,
            streams,
            tokens=tokens,
            interval_ms=interval_ms,
            note=note,
        )
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(output, {"interval_ms": interval_ms, "tokens": tokens, "measured_at": measured_at} | found)


def floor_or_why(flow: Workflow, output: Path, note: Callable[[str], None], streams: Sequence[int]) -> None:
    """As `write_floor`, but a client that can't be tested keeps nobody from measuring: the record says why."""
    try:
        if not flow.serving_python.exists():
            # Results that came from elsewhere: what this machine adds is not in them.
            raise UserError("the serving environment that measured the cells is not on this machine")
        write_floor(flow, output, note, streams=streams)
    except UserError as error:
        note(f"the client's self-test failed, so there is no measurement floor: {error}")
        write_json(output, {"rows": [], "why_not": str(error)})


def measure(
    python: Path,
    tokenizer: str,
    streams: Sequence[int],
    *,
    tokens: int,
    interval_ms: float,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """The client's error at each number of streams.

    Args:
        python: interpreter of the serving environment.
        tokenizer: folder or hub name.
        streams: requests in flight.
        tokens: per answer.
        interval_ms: true gap between tokens.
        note: takes a line for a person.

    Returns:
        `rows`, per number of streams what `errors_of` says of it, and `others_cpu_percent`, what other processes
        used of one core meanwhile: a floor that was measured beside other work is too high, never too low.

    Raises:
        UserError: the engine or the client did not start, or the client failed.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="splitbench-selftest-") as scratch:
        folder = Path(scratch)
        port = _free_port()
        engine = [sys.executable, str(PACED_ENGINE), "--port", str(port), "--tokens", str(tokens)]
        engine += ["--interval-ms", f"{interval_ms:g}"]
        client = [str(python), client_server.__file__, str(folder / "client.sock")]
        log = (folder / "processes.log").open("wb")
        processes = [
            subprocess.Popen(argv, stdout=log, stderr=log, env=os.environ | client_env(tokenizer))
            for argv in (engine, client)
        ]
        watch = Sampler({"engine:paced": processes[0].pid}, ours=[os.getpid(), processes[1].pid])
        try:
            _await(lambda: _listens(port), processes[0], "the paced engine", folder)
            _await((folder / "client.sock").exists, processes[1], "the client", folder)
            watch.start()
            for count in streams:
                rows.append(_at(folder, port, tokenizer, count, tokens, watch.watch_client))
                row = rows[-1]
                note(
                    f"{count} streams: ITLs off by {row['itl_error_p50_ms']:.2f} ms in the median, "
                    f"{row['itl_error_p99_ms']:.2f} ms at P99; TTFT by {row.get('ttft_error_p50_ms', math.nan):.2f} ms"
                )
            series = watch.stop()
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(timeout=30)
            log.close()
    others = [value for one in series if one.metric == "others_cpu_percent" for value in one.values]
    return {"rows": rows, "others_cpu_percent": round(statistics.fmean(others), 1) if others else None}


def _at(
    folder: Path,
    port: int,
    tokenizer: str,
    count: int,
    tokens: int,
    started: Callable[[int], None],
) -> dict[str, float]:
    name = f"{count}.json"
    argv = [
        *("bench", "serve", "--backend", "openai", "--base-url", f"http://127.0.0.1:{port}"),
        *("--endpoint", "/v1/completions", "--model", "mock", "--tokenizer", tokenizer),
        *("--dataset-name", "random", "--random-input-len", "16", "--random-output-len", str(tokens)),
        *("--num-prompts", str(max(count, LEAST_REQUESTS)), "--max-concurrency", str(count)),
        *("--request-rate", "inf", "--seed", "1"),
        *("--ignore-eos", "--disable-tqdm", "--ready-check-timeout-sec", "0"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", name),
    ]
    ended = run_warm(folder / "client.sock", argv, folder / "client.log", lambda: None, started=started)
    if ended.exit_code != 0 or not (folder / name).exists():
        tail = (folder / "client.log").read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
        raise UserError(f"the client failed: {' | '.join(tail)}", where="selftest-client")
    return {"streams": count, **errors_of(json.loads((folder / name).read_text(encoding="utf-8")))}


def errors_of(bench: Mapping[str, Any]) -> dict[str, float]:
    """Reported less true latencies of a run against the paced engine, in milliseconds.

    The texts hold, token by token, the moment (perf_counter, ns) at which each was written.

    Raises:
        UserError: texts and latencies don't belong together.
    """
    lacking = [name for name in ("generated_texts", "itls", "ttfts") if not bench.get(name)]
    if lacking:
        raise UserError(f"this version of the client states no {', '.join(lacking)}", where="selftest-client")
    gaps: list[float] = []
    firsts: list[float] = []
    missing = 0
    starts_s = bench.get("start_times") or [math.nan] * len(bench["errors"])  # vLLM 0.11 does not state them
    for text, itls, ttft, start_s, error in zip(
        *(bench[name] for name in ("generated_texts", "itls", "ttfts")),
        starts_s,
        bench["errors"],
        strict=True,
    ):
        stamps_s = [int(word) / 1e9 for word in text.split() if len(word) == _STAMP_DIGITS]
        if error or not stamps_s:
            raise UserError(
                f"a request to the paced engine failed: {error or 'no text'}", where="selftest-client"
            )
        firsts.append((ttft - (stamps_s[0] - start_s)) * 1e3)
        if len(stamps_s) != len(itls) + 1:
            missing += 1  # several tokens were seen as one: which gap is whose can't be said
            continue
        true = [later - earlier for earlier, later in itertools.pairwise(stamps_s)]
        gaps += [(seen - real) * 1e3 for seen, real in zip(itls, true, strict=True)]
    sizes = sorted(abs(gap) for gap in gaps) or [math.nan]
    found = {
        "itl_error_p50_ms": statistics.median(sizes),
        "itl_error_p99_ms": sizes[min(len(sizes) - 1, math.ceil(0.99 * len(sizes)) - 1)],
        "itl_error_max_ms": sizes[-1],
        "merged_percent": 100 * missing / len(firsts),
    }
    if not math.isnan(firsts[0]):
        found |= {"ttft_error_p50_ms": statistics.median(firsts), "ttft_error_max_ms": max(firsts)}
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _await(ready: Callable[[], bool], process: subprocess.Popen[bytes], name: str, folder: Path) -> None:
    until_s = time.monotonic() + START_LIMIT_S
    while not ready():
        if process.poll() is not None or time.monotonic() > until_s:
            tail = (folder / "processes.log").read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
            raise UserError(f"{name} did not start: {' | '.join(tail)}", where="selftest-client")
        time.sleep(0.1)
