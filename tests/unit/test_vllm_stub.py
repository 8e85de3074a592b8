# SPDX-License-Identifier: Apache-2.0
"""The stub of vLLM is what tests of the workflow rest on, so it is tested itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.layouts import STUB, free_ports
from tests.fakes.serving_environment import make_environment, set_behaviour

# Keys of a real result file of vLLM 0.32 with --save-detailed, percentiles aside.
RESULT_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *(
        "total_token_throughput",
        "input_lens",
        "output_lens",
        "ttfts",
        "itls",
        "start_times",
        "generated_texts",
    ),
    *("errors", "max_output_tokens_per_s", "max_concurrent_requests", "rtfx", "latencies", "queue_times"),
}


def get(port: int, path: str, body: Any = None) -> tuple[int, str]:
    """One request; status and text."""
    data = None if body is None else json.dumps(body).encode()
    ask = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(ask, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def counter(port: int, name: str) -> float:
    """One sample of /metrics."""
    text = get(port, "/metrics")[1]
    return float(
        next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"vllm:{name}"))
    )


@contextmanager
def server(port: int, *arguments: str, **behaviour: str) -> Iterator[subprocess.Popen[bytes]]:
    """A stubbed engine that is up."""
    env = {"PYTHONPATH": str(STUB), **{f"VLLM_STUB_{key.upper()}": value for key, value in behaviour.items()}}
    if "kv-transfer-config" in " ".join(arguments):
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port + 1)
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "/models/m", "--port", str(port)]
    words += ["--served-model-name", "m", *arguments]
    process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                if get(port, "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()


def bench(port: int, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the stub's benchmark client; its result file."""
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--model", "/models/m"]
    words += ["--served-model-name", "m", "--port", str(port), "--save-result", "--save-detailed"]
    words += ["--result-dir", str(folder), "--result-filename", "r.json", "--ignore-eos", *arguments]
    subprocess.run(words, env={"PYTHONPATH": str(STUB)}, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return found


def test_a_benchmark_gives_a_result_of_the_real_form(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    with server(port):
        shape = ("--random-input-len", "50", "--random-output-len", "6", "--num-prompts", "9")
        result = bench(port, tmp_path, *shape, "--max-concurrency", "3", "--metadata", "layout=agg", "x=1")
    assert set(result) >= RESULT_KEYS
    assert (result["layout"], result["x"]) == ("agg", "1")
    assert (result["completed"], result["failed"]) == (9, 0)
    assert result["input_lens"] == [50] * 9
    assert result["output_lens"] == [6] * 9
    assert [len(itls) for itls in result["itls"]] == [5] * 9
    assert result["errors"] == [""] * 9
    for ttft, itls, latency in zip(result["ttfts"], result["itls"], result["latencies"], strict=True):
        assert ttft > 0
        assert ttft + sum(itls) == pytest.approx(latency)


def test_the_concurrency_is_kept(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    with server(port, step_ms="2"):
        result = bench(
            port, tmp_path, "--num-prompts", "12", "--max-concurrency", "2", "--random-output-len", "4"
        )
    spans = sorted(zip(result["start_times"], result["latencies"], strict=True))
    for start, _ in spans:
        assert sum(other <= start < other + latency for other, latency in spans) <= 2


def test_equal_seeds_give_equal_prompts_and_answers_depend_on_them(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    shape = ("--num-prompts", "3", "--random-input-len", "20", "--random-output-len", "3")
    with server(port):
        texts = [bench(port, tmp_path, *shape, "--seed", seed)["generated_texts"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3


def test_failed_requests_are_recorded_and_the_exit_code_is_0(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    with server(port, die_after_requests="4"):
        result = bench(
            port, tmp_path, "--num-prompts", "10", "--max-concurrency", "1", "--random-output-len", "2"
        )
    assert (result["completed"], result["failed"]) == (4, 6)
    assert [bool(error) for error in result["errors"]] == [False] * 4 + [True] * 6
    assert result["ttfts"][4:] == [0.0] * 6
    assert result["itls"][4:] == [[]] * 6


def test_unknown_options_are_refused() -> None:
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--no-such-option", "1"]
    done = subprocess.run(words, env={"PYTHONPATH": str(STUB)}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unrecognized arguments: --no-such-option" in done.stderr


def test_endpoints() -> None:
    port = free_ports(1)[0]
    with server(port):
        models = json.loads(get(port, "/v1/models")[1])
        assert [card["id"] for card in models["data"]] == ["m"]
        ask = {"model": "m", "prompt": "a b c d", "max_tokens": 3}
        status, text = get(port, "/v1/completions", ask)
        assert status == 200
        assert json.loads(text)["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
        assert get(port, "/v1/completions", {**ask, "model": "other"})[0] == 400
        assert get(port, "/v1/completions", {**ask, "n": 2})[0] == 400
        assert counter(port, "prompt_tokens_total") == 4
        assert counter(port, "generation_tokens_total") == 3
        assert get(port, "/nothing")[0] == 404
        assert json.loads(get(port, "/server_info")[1])["vllm_config"]["cache_config"][
            "enable_prefix_caching"
        ]


def test_the_prefix_cache_hits_until_it_is_reset() -> None:
    port = free_ports(1)[0]
    ask = {"model": "m", "prompt": list(range(64)), "max_tokens": 1}
    with server(port):
        get(port, "/v1/completions", ask)
        assert counter(port, "prefix_cache_hits_total") == 0
        get(port, "/v1/completions", ask)
        assert counter(port, "prefix_cache_hits_total") == 63
        assert get(port, "/reset_prefix_cache", {})[0] == 200
        get(port, "/v1/completions", ask)
        assert counter(port, "prefix_cache_hits_total") == 63
    with server(port, "--no-enable-prefix-caching"):
        for _ in range(2):
            get(port, "/v1/completions", ask)
        assert counter(port, "prefix_cache_hits_total") == 0


def test_kv_moves_only_with_the_prefillers_own_answer() -> None:
    prefill, _, decode, _ = free_ports(4)
    transfer = ("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}')
    prompt = {"model": "m", "prompt": list(range(40))}
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    with server(prefill, *transfer), server(decode, *transfer):
        reply = json.loads(
            get(prefill, "/v1/completions", {**prompt, "max_tokens": 1, "kv_transfer_params": remote})[1]
        )
        params = reply["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        assert params["remote_port"] == prefill + 1
        get(decode, "/v1/completions", {**prompt, "max_tokens": 5, "kv_transfer_params": params})
        moved = 'prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"'
        assert counter(decode, moved) == 40
        get(decode, "/v1/completions", {**prompt, "max_tokens": 5, "kv_transfer_params": params})
        assert counter(decode, moved) == 40, "what was pulled once has been given away"
        get(decode, "/v1/completions", {**prompt, "max_tokens": 5})
        assert counter(decode, moved) == 40


def test_a_fake_serving_environment_has_the_stub_and_its_behaviour(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", die_early="as told")
    port = free_ports(1)[0]
    words = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", "m", "--port", str(port)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "as told" in done.stderr
    set_behaviour(tmp_path / "env", no_such=1)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "unknown behaviour no_such" in done.stderr


def test_sigterm_ends_it_unless_told_otherwise() -> None:
    port = free_ports(1)[0]
    with server(port) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
