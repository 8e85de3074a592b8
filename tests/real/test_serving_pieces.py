# SPDX-License-Identifier: Apache-2.0
"""The pieces that the demo stands on, against real engines: model, calm connector, warm client.

One pair of engines serves all tests: asked directly, each is an ordinary engine that computes its own prompts; asked
one after the other with KV parameters, they are a PD pair.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from splitbench.environment.serving_environment import ServingEnvironment
from splitbench.environment.stage import ensure_serving
from splitbench.errors import UserError
from splitbench.files import read_json
from splitbench.measuring import client_server
from splitbench.measuring.around import SessionNotes, Watching
from splitbench.measuring.client import run_warm
from splitbench.measuring.logs import ucx_transports
from splitbench.serving.session import Server
from splitbench.serving.synthetic_model import SyntheticModel, make_synthetic_model, read_weights
from splitbench.workflow import REPOSITORY, Workflow
from tests.reference_llama import greedy, next_logits

pytestmark = pytest.mark.real

SPEC = SyntheticModel(max_model_len=2048)
START_LIMIT_S = 600.0


@dataclass
class Engine:
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    manner_file: Path
    """What a decoder's connector does badly; see `broken_nixl`."""

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, tokens: list[int], count: int, **more: Any) -> dict[str, Any]:
        body = {
            "model": "m",
            "prompt": tokens,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return dict(json.loads(answer.read()))

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels; 0 where there are none."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            match = re.fullmatch(r"(\S+?)(\{.*\})? (\S+)", line)
            if (
                match
                and match[1] == name
                and all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items())
            ):
                total += float(match[3])
        return total


def _words(answer: dict[str, Any]) -> list[int]:
    return [int(word.removeprefix("w")) for word in answer["choices"][0]["text"].split()]


def _prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(SPEC.vocabulary - 2) for _ in range(length)]


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return ports


@pytest.fixture(scope="module")
def environment() -> ServingEnvironment:
    config = yaml.safe_load((REPOSITORY / "config" / "config.yaml").read_text())
    flow = Workflow(config)
    folder = REPOSITORY / flow.serving_folder
    ensure_serving(flow, lambda message: None)
    found = ServingEnvironment.at(folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "synthetic"
    make_synthetic_model(SPEC, path)
    return path


@pytest.fixture(scope="module")
def pair(
    environment: ServingEnvironment, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    logs = tmp_path_factory.mktemp("logs")
    manner_file = logs / "manner"
    ports = _free_ports(4)
    started: list[Engine] = []
    try:
        for index, role in enumerate(("kv_producer", "kv_consumer")):
            transfer = {
                "kv_connector": "NixlConnector",
                # The decoder's is the same, and can be told to move KV badly.
                "kv_connector_module_path": ("splitbench.serving.calm_nixl", "tests.real.broken_nixl")[index],
                "kv_role": role,
                "kv_buffer_device": "cpu",
                "kv_connector_extra_config": {"manner_file": str(manner_file)},
            }
            argv = [
                *(str(environment.python_path), "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
                *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(ports[index])),
                # Without a dtype vLLM would take a float32 model down to bfloat16.
                *("--enforce-eager", "--no-enable-prefix-caching", "--dtype", "float32"),
                *("--kv-transfer-config", json.dumps(transfer)),
            ]
            log = logs / f"{role}.log"
            with log.open("wb") as handle:
                process = subprocess.Popen(
                    argv,
                    stdout=handle,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={
                        **os.environ,
                        "PYTHONPATH": str(REPOSITORY),
                        "HF_HUB_OFFLINE": "1",
                        "VLLM_NO_USAGE_STATS": "1",
                        "VLLM_SERVER_DEV_MODE": "1",
                        "VLLM_CPU_KVCACHE_SPACE": "1",
                        # The worker in the engine's own process: no queue between them that polls.
                        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                        "OMP_NUM_THREADS": "1",
                        # libgomp binds the first thread of every process that loads it, and its threads inherit that.
                        "GOMP_CPU_AFFINITY": str(index),
                        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[2 + index]),
                        "UCX_TLS": "tcp,shm,self",
                        "UCX_LOG_LEVEL": "info",
                    },
                )
            started.append(Engine(ports[index], process, log, manner_file))
        until_s = time.monotonic() + START_LIMIT_S
        for engine in started:
            while True:
                assert engine.process.poll() is None, engine.log.read_text()[-3000:]
                assert time.monotonic() < until_s, engine.log.read_text()[-3000:]
                try:
                    engine.get("/health")
                    break
                except OSError:
                    time.sleep(0.3)
        yield started[0], started[1]
    finally:
        for engine in started:
            os.killpg(engine.process.pid, signal.SIGTERM)
        for engine in started:
            try:
                engine.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(engine.process.pid, signal.SIGKILL)
                engine.process.wait()


def _disaggregated(
    pair: tuple[Engine, Engine],
    tokens: list[int],
    count: int,
    prefilled: list[int] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Prefill, then decode; `prefilled` is the prompt whose KV the decoder gets, if not its own."""
    prefill, decode = pair
    wanted = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    first = prefill.complete(prefilled or tokens, 1, kv_transfer_params=wanted)
    return decode.complete(tokens, count, kv_transfer_params=first["kv_transfer_params"], **more)


def test_the_engine_says_what_the_architecture_says(pair: tuple[Engine, Engine], model: Path) -> None:
    weights = read_weights(model)
    for length in (5, 200):
        prompt = _prompt(length, length)
        assert _words(pair[0].complete(prompt, 4)) == greedy(weights, SPEC, prompt, 4)


def test_the_first_of_many_tokens_decides_the_answer(pair: tuple[Engine, Engine], model: Path) -> None:
    for seed in range(3):
        prompt = _prompt(seed, 1000)
        other = [(prompt[0] + 1) % 31_000, *prompt[1:]]
        answers = [_words(pair[0].complete(tokens, 8)) for tokens in (prompt, prompt, other)]
        assert answers[0] == answers[1]
        assert answers[0] != answers[2]
        assert len(answers[0]) == 8


def test_decoding_on_moved_kv_gives_the_same_answer_and_computes_no_prompt(
    pair: tuple[Engine, Engine],
) -> None:
    decode = pair[1]
    names = ("external_kv_transfer", "local_compute", "local_cache_hit")

    def by_source() -> dict[str, float]:
        return {name: decode.metric("vllm:prompt_tokens_by_source_total", source=name) for name in names}

    prompts = [_prompt(100 + length, length) for length in (100, 128, 129, 900)]
    alone = [_words(pair[0].complete(prompt, 8)) for prompt in prompts]
    before, bytes_before = by_source(), decode.metric("vllm:nixl_bytes_transferred_sum")
    moved = [_words(_disaggregated(pair, prompt, 8)) for prompt in prompts]
    after, bytes_after = by_source(), decode.metric("vllm:nixl_bytes_transferred_sum")
    assert moved == alone
    tokens = sum(map(len, prompts))
    assert {name: after[name] - before[name] for name in names} == {
        "external_kv_transfer": tokens,
        "local_compute": 0,
        "local_cache_hit": 0,
    }
    blocks = sum(-(-len(prompt) // 128) for prompt in prompts)
    assert bytes_after - bytes_before == blocks * 128 * SPEC.kv_bytes_per_token
    assert decode.metric("vllm:nixl_num_failed_transfers_total") == 0
    assert ucx_transports(decode.log.read_text()) & {"tcp", "posix", "sysv", "cma"}


def test_the_connector_is_ours_and_leaves_each_worker_its_core(pair: tuple[Engine, Engine]) -> None:
    for core, engine in enumerate(pair):
        text = engine.log.read_text()
        assert f"NIXL progress thread pauses 1000 us; worker stays on cores [{core}]" in text
        assert "Releasing expired KV blocks" not in text


class FrontDoor(ThreadingHTTPServer):
    """A front door of the pair that does its work well, or in one of two ways badly.

    `forgetful` never tells the decoder where the KV is, so it computes every prompt again. `mistaken` gives it the KV
    of another prompt: every counter is right, the answers are not.
    """

    def __init__(self, pair: tuple[Engine, Engine]) -> None:
        super().__init__(("127.0.0.1", 0), _Door)
        self.pair, self.manner = pair, "sound"

    def complete(self, tokens: list[int], count: int, **more: Any) -> dict[str, Any]:
        if self.manner == "sound":
            return _disaggregated(self.pair, tokens, count, **more)
        if self.manner == "forgetful":
            self.pair[0].complete(tokens, 1)
            return self.pair[1].complete(tokens, count, **more)
        wrong = [(token + 1) % 31_000 for token in tokens]
        return _disaggregated(self.pair, tokens, count, prefilled=wrong, **more)


class _Door(BaseHTTPRequestHandler):
    server: FrontDoor

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        more = {name: asked[name] for name in ("logprobs", "return_tokens_as_token_ids") if name in asked}
        body = json.dumps(self.server.complete(asked["prompt"], asked["max_tokens"], **more)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def front_door(pair: tuple[Engine, Engine]) -> Iterator[FrontDoor]:
    door = FrontDoor(pair)
    thread = threading.Thread(target=door.serve_forever)
    thread.start()
    yield door
    door.shutdown()
    thread.join()
    door.server_close()


@pytest.mark.parametrize(
    ("manner", "connector", "kv_moved", "same_answers", "words"),
    [
        ("sound", "sound", "ok", "ok", "answers agree to 100 %"),
        ("forgetful", "sound", "invalid", "ok", "loaded only 0.0 %"),
        ("mistaken", "sound", "ok", "invalid", "it agrees with itself to 100 %"),
        ("sound", "silent", "invalid", "invalid", "no byte"),
        ("sound", "unwritten", "ok", "invalid", "it agrees with itself to 100 %"),
        ("sound", "misplaced", "ok", "invalid", "it agrees with itself to 100 %"),
    ],
)
def test_a_pair_that_does_not_move_kv_well_is_refused(
    front_door: FrontDoor,
    tmp_path: Path,
    manner: str,
    connector: str,
    kv_moved: str,
    same_answers: str,
    words: str,
) -> None:
    front_door.manner = manner
    engines = [
        Server(name, role, f"http://127.0.0.1:{engine.port}", engine.process.pid, engine.log)
        for name, role, engine in zip(
            ("prefill-0", "decode-0"), ("prefill", "decode"), front_door.pair, strict=True
        )
    ]
    session: Any = SimpleNamespace(
        engines=engines, proxy=None, front_url=f"http://127.0.0.1:{front_door.server_port}", folder=tmp_path
    )
    plan = SimpleNamespace(connector="nixl", kind="pd", served_model="m", services=())
    cell: Any = SimpleNamespace(plan=plan, layout="pd")
    told = front_door.pair[1].manner_file
    told.write_text(connector)
    began = time.monotonic()
    said: list[str] = []
    refused = ""
    notes = SessionNotes(session)
    try:
        notes.smoke(cell, session, Watching(longest=1024), said.append)
    except UserError as error:
        refused = str(error)
    finally:
        told.unlink()
    found = {each["name"]: each for each in read_json(tmp_path / "measuring.json")["smoke"].values()}
    assert (found["kv-moved"]["verdict"], found["same-answers"]["verdict"]) == (kv_moved, same_answers), said
    assert words in " ".join(said)
    assert ("failed its smoke test and is not measured" in refused) == ("invalid" in (kv_moved, same_answers))
    assert time.monotonic() - began < 30


def test_an_idle_pair_takes_no_core(pair: tuple[Engine, Engine]) -> None:
    import psutil

    def seconds() -> float:
        family = [psutil.Process(engine.process.pid) for engine in pair]
        family += [child for parent in list(family) for child in parent.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in family)

    time.sleep(2)  # vLLM's queues poll for a second after the last request
    before = seconds()
    time.sleep(4)
    # NIXL's own progress thread spins without pause: 4 s of processor for each of the two engines.
    assert seconds() - before < 2.0


def test_the_warm_client_measures_what_a_cold_one_measures(
    pair: tuple[Engine, Engine], environment: ServingEnvironment, model: Path, tmp_path: Path
) -> None:
    def argv(name: str) -> list[str]:
        return [
            *("bench", "serve", "--backend", "openai", "--base-url", f"http://127.0.0.1:{pair[0].port}"),
            *("--endpoint", "/v1/completions", "--model", "m", "--tokenizer", str(model)),
            *("--dataset-name", "random", "--random-input-len", "150", "--random-output-len", "6"),
            *("--num-prompts", "6", "--max-concurrency", "2", "--request-rate", "inf", "--seed", "11"),
            *("--ignore-eos", "--temperature", "0", "--disable-tqdm", "--save-result", "--save-detailed"),
            *("--result-dir", str(tmp_path), "--result-filename", name),
        ]

    path = tmp_path / "client.sock"
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            [environment.python_path, client_server.__file__, str(path)], stdout=log, stderr=log
        )
    try:
        while not path.exists():
            assert server.poll() is None
            time.sleep(0.05)
        first = run_warm(path, argv("warm.json"), tmp_path / "warm.log", lambda: None)
        second = run_warm(path, argv("again.json"), tmp_path / "again.log", lambda: None)
        wrong = [text.replace(f":{pair[0].port}", ":9") for text in argv("none.json")]
        wrong += ["--ready-check-timeout-sec", "1"]
        failed = run_warm(path, wrong, tmp_path / "failed.log", lambda: None)
    finally:
        server.terminate()
        server.wait(timeout=30)
    assert "with 1 Python thread(s)" in (tmp_path / "server.log").read_text()
    assert (first.exit_code, second.exit_code) == (0, 0)
    cold_run = subprocess.run(
        [environment.python_path, "-m", "vllm.entrypoints.cli.main", *argv("cold.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert cold_run.returncode == 0, cold_run.stderr[-2000:]
    cold, warm, again = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("cold", "warm", "again")
    )
    same = {key for key in cold if key.endswith("_lens") or key in {"generated_texts", "errors", "completed"}}
    assert len(same) == 5
    for key in same:
        assert cold[key] == warm[key] == again[key], key
    assert cold.keys() == warm.keys()
    assert cold["completed"] == 6
    assert cold["input_lens"] == [150] * 6
    assert all(len(text.split()) == 6 for text in cold["generated_texts"])
    # No server there: the end of an uncaught error, as of any Python program.
    assert failed.exit_code == 1
    assert "Traceback" in (tmp_path / "failed.log").read_text()


def test_engine_facts_can_be_asked(pair: tuple[Engine, Engine]) -> None:
    facts = json.loads(pair[1].get("/server_info?config_format=json"))
    assert facts["vllm_config"]["model_config"]["enforce_eager"] is True
    assert facts["vllm_config"]["cache_config"]["block_size"] == 128
    assert facts["vllm_config"]["cache_config"]["enable_prefix_caching"] is False
    reset = urllib.request.Request(f"http://127.0.0.1:{pair[1].port}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(reset, timeout=30) as answer:
        assert answer.status == 200


def test_logits_do_not_depend_on_how_the_prompt_is_cut(model: Path) -> None:
    # The numpy reference agrees with itself when the prompt is cut short and continued: it is causal.
    weights = read_weights(model)
    prompt = _prompt(9, 40)
    changed_later = [*prompt[:30], *_prompt(10, 10)]
    assert (next_logits(weights, SPEC, prompt[:30]) == next_logits(weights, SPEC, changed_later[:30])).all()
