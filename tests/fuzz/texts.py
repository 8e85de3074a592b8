# SPDX-License-Identifier: Apache-2.0
"""What other programs write: engine logs, /metrics pages, probes' output, events of a stream, plans of a session."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from splitbench.environment.probes import base, gpu, network, software, system
from splitbench.measuring import logs, metrics
from splitbench.measuring.logs import EngineLog
from splitbench.proxy.events import EventSplitter
from splitbench.proxy.wire import EngineError, FramingError, WholeChunks
from splitbench.serving import facts, failures
from tests.fuzz.bending import bent_bytes, bent_json, bent_text
from tests.fuzz.judging import answered

FIXTURES = Path(__file__).parents[1] / "fixtures"


def _kept(folder: str) -> list[str]:
    found = sorted(path for path in (FIXTURES / folder).rglob("*") if path.is_file())
    return [path.read_text(encoding="utf-8", errors="replace")[:30_000] for path in found]


LOGS = [*_kept("logs"), *_kept("engines"), ""]
PROBED = [*_kept("probe"), ""]


@given(st.data(), st.sampled_from(LOGS), st.sampled_from(["aggregated", "prefill", "decode"]), st.booleans())
def engine_log(data: st.DataObject, sound: str, role: str, on_gpus: bool) -> None:
    """A log, under every reader of logs: signatures, loads, transports, facts, causes of a failed start."""
    text = data.draw(bent_text(sound))

    def read() -> None:
        log = EngineLog(role=role, start=text, cell=text)
        for line in logs.summary(logs.scan("engine-0", log, on_gpus=on_gpus)):
            assert isinstance(line, str)
        logs.lmcache_loads(text)
        logs.ucx_transports(text)
        json.dumps(
            facts.read_facts(log=text, metrics=text, server_info={"vllm_config": text}), allow_nan=False
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "engine.log"
            path.write_text(text, encoding="utf-8", errors="surrogatepass")
            failures.mend_for(path)
            shown = failures.log_tail(path)
            assert all(line.isprintable() for line in "".join(shown).split("\t")), shown

    answered(read)


INFO = {
    "vllm_config": {
        "model_config": {"dtype": "torch.bfloat16", "enforce_eager": False, "max_model_len": 4096},
        "cache_config": {"enable_prefix_caching": True, "block_size": 16, "num_gpu_blocks": 100},
        "scheduler_config": {"max_num_batched_tokens": 8192, "chunked_prefill_enabled": True},
        "compilation_config": {"cudagraph_mode": "FULL", "mode": 3},
    }
}


@given(bent_json(INFO))
def server_info(info: Any) -> None:
    """An engine's own account of itself."""
    answered(lambda: json.dumps(facts.read_facts(log="", server_info=info), allow_nan=False))


PAGE = """# HELP vllm:x x
# TYPE vllm:x counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 5.0
vllm:prefix_cache_hits_total{engine="0"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0
x_bucket{le="+Inf"} NaN
"""


@given(bent_text(PAGE), bent_text(PAGE))
def metrics_page(before: str, after: str) -> None:
    """Pages of /metrics."""

    def read() -> None:
        first, second = metrics.parse_metrics(before), metrics.parse_metrics(after)
        for name in ("vllm:prefix_cache_hits_total", "vllm:prompt_tokens_by_source_total"):
            metrics.growth(first, second, name)
            metrics.growth(first, second, name, source="local_compute")

    answered(read)


PARSERS: list[Callable[[str], Any]] = [
    getattr(module, name)
    for module in (gpu, network, software, system)
    for name in sorted(vars(module))
    if name.startswith("parse_") and getattr(module, name).__module__ == module.__name__
]


@given(st.data(), st.sampled_from(PROBED), st.sampled_from(PARSERS))
def probe_output(data: st.DataObject, sound: str, parser: Callable[[str], Any]) -> None:
    """Output of tools of the node, whole or damaged, in the right or the wrong parser."""
    text = data.draw(bent_text(sound) | bent_json({"a": [1, {"b": "c"}]}).map(json.dumps))

    def read() -> None:
        probe = base.Probe("x", base.Ask("made up", lambda: text), parser)
        found = base.run_probe(probe)
        json.dumps(found.facts, allow_nan=False)

    answered(read)


STREAM = (
    b'data: {"id":"x","object":"text_completion","created":1,"model":"m","choices":'
    b'[{"index":0,"text":" a","logprobs":null,"finish_reason":null}],"usage":{"prompt_tokens":3}}\n\n'
    b'data: {"id":"x","choices":[{"index":0,"text":"b","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
)
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(STREAM), STREAM)


@given(bent_bytes(STREAM), bent_bytes(CHUNKED), st.integers(1, 64))
def event_stream(stream: bytes, chunked: bytes, step: int) -> None:
    """Events and chunks as an engine in trouble sends them: passed on, or refused by the proxy's own errors."""

    def read() -> None:
        splitter = EventSplitter()
        events = [
            event for at in range(0, len(stream), step) for event in splitter.feed(stream[at : at + step])
        ]
        assert sum(map(len, events)) <= len(stream)
        chunks = WholeChunks()
        try:
            for at in range(0, len(chunked), step):
                chunks.feed(chunked[at : at + step])
        except (FramingError, EngineError):
            return

    answered(read)


TARGETS = {
    "engine-log": engine_log,
    "server-info": server_info,
    "metrics-page": metrics_page,
    "probe-output": probe_output,
    "event-stream": event_stream,
}
