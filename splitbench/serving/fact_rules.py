# SPDX-License-Identifier: Apache-2.0
"""Which facts are known of an engine, and where each is found: keys, labels, and lines of the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Value = bool | int | float | str


def _flag(value: Any) -> bool | None:
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())


def _negated(value: Any) -> bool | None:
    flag = _flag(value)
    return None if flag is None else not flag


def _whole(value: Any) -> int | None:
    try:
        return int(str(value).replace(",", ""))
    except ValueError:
        return None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        value = value[0] if value else None
    text = str(value).strip()
    return None if value is None or text in ("", "None", "N/A") else text


def _dtype(value: Any) -> str | None:
    text = _text(value)
    return text.removeprefix("torch.") if text else None


def _name(value: Any) -> str | None:
    """A model without the folder that holds it on this machine."""
    text = _text(value)
    return text.rstrip("/").rpartition("/")[2] if text and text.startswith("/") else text


def _lower(value: Any) -> str | None:
    text = _text(value)
    return text.lower() if text else None


_GRAPHS = {"0": "none", "1": "piecewise", "2": "full", "2,0": "full_decode_only", "2,1": "full_and_piecewise"}


def _graphs(value: Any) -> str | None:
    """CUDAGraphMode as a name, from its name or from the enum's value in JSON (a number, or a pair)."""
    if isinstance(value, list):
        value = ",".join(map(str, value))
    text = _lower(value)
    return _GRAPHS.get(text.replace(" ", "").strip("()"), text) if text else None


@dataclass(frozen=True)
class Rule:
    """Where one fact is found.

    Attributes:
        meaning: for docs.
        convert: to its type; None where the text says nothing.
        info: keys in the /server_info answer, dots between levels.
        metric: label of `vllm:cache_config_info`.
        log: patterns with one group, or (pattern, value) where the line alone says it.
        order: sources, the most telling first.
    """

    meaning: str
    convert: Callable[[Any], Value | None]
    info: tuple[str, ...] = ()
    metric: str | None = None
    log: tuple[str | tuple[str, Value], ...] = ()
    order: tuple[str, ...] = ("server_info", "metrics", "log")


def _config(key: str) -> str:
    """Pattern of `key=value` in the engine's own configuration line."""
    return rf"\bwith config: .*?\b{key}='?([^,'\s]+)"


RULES: Mapping[str, Rule] = {
    "vllm_version": Rule(
        "version of vLLM",
        _text,
        info=("system_env.vllm_version",),
        log=(
            r"Initializing a V\d LLM engine \(v([^)\s]+)\)",
            r"vLLM API server version (\S+)",
            r"\bversion (\d+\.\d\S*)\s*$",
        ),
        order=("log", "server_info"),
    ),
    "torch_version": Rule("version of torch", _text, info=("system_env.torch_version",)),
    "lmcache_version": Rule(
        "version of LMCache, where it is the connector",
        _text,
        log=(r"LMCache initialized for role .*? with version ([^,\s]+)",),
    ),
    "model": Rule(
        "model as the engine was given it; of a folder only its name",
        _name,
        info=("vllm_config.model_config.model",),
        log=(_config("model"),),
    ),
    "served_model_name": Rule(
        "name under which it is served",
        _text,
        info=("vllm_config.model_config.served_model_name",),
        log=(_config("served_model_name"),),
    ),
    "dtype": Rule(
        "type of weights and activations",
        _dtype,
        info=("vllm_config.model_config.dtype",),
        log=(_config("dtype"),),
    ),
    "quantization": Rule(
        "quantisation of the weights; null: none, or not stated",
        _text,
        info=("vllm_config.model_config.quantization",),
        log=(_config("quantization"),),
    ),
    "kv_cache_dtype": Rule(
        "type of the KV cache; auto: as the model",
        _dtype,
        info=("vllm_config.cache_config.cache_dtype",),
        metric="cache_dtype",
        log=(_config("kv_cache_dtype"),),
    ),
    "max_model_len": Rule(
        "longest request, tokens",
        _whole,
        info=("vllm_config.model_config.max_model_len",),
        log=(_config("max_seq_len"), r"Using max model len (\d+)"),
    ),
    "tensor_parallel": Rule(
        "tensor parallel size",
        _whole,
        info=("vllm_config.parallel_config.tensor_parallel_size",),
        log=(_config("tensor_parallel_size"),),
    ),
    "pipeline_parallel": Rule(
        "pipeline parallel size",
        _whole,
        info=("vllm_config.parallel_config.pipeline_parallel_size",),
        log=(_config("pipeline_parallel_size"),),
    ),
    "data_parallel": Rule(
        "data parallel size",
        _whole,
        info=("vllm_config.parallel_config.data_parallel_size",),
        log=(_config("data_parallel_size"),),
    ),
    "enforce_eager": Rule(
        "true: no compilation and no graphs",
        _flag,
        info=("vllm_config.model_config.enforce_eager",),
        log=(
            _config("enforce_eager"),
            (r"Enforce eager set|Cudagraph is disabled under eager mode", True),
            (r"Graph capturing finished", False),
        ),
    ),
    "cuda_graphs": Rule(
        "`none`, `piecewise`, `full`, `full_decode_only` or `full_and_piecewise`",
        _graphs,
        info=("vllm_config.compilation_config.cudagraph_mode",),
        log=(r"'cudagraph_mode': <CUDAGraphMode\.(\w+)", (r"Enforce eager set", "none")),
    ),
    "prefix_caching": Rule(
        "prefix caching on",
        _flag,
        info=("vllm_config.cache_config.enable_prefix_caching",),
        metric="enable_prefix_caching",
        log=(_config("enable_prefix_caching"), r"'enable_prefix_caching': (True|False)"),
    ),
    "chunked_prefill": Rule(
        "long prompts are computed in pieces beside decode",
        _flag,
        info=("vllm_config.scheduler_config.enable_chunked_prefill",),
        log=(
            _config("enable_chunked_prefill"),
            _config("chunked_prefill_enabled"),
            (r"Chunked prefill is enabled", True),
        ),
    ),
    "max_num_batched_tokens": Rule(
        "token budget of a step: what chunked prefill may take of it",
        _whole,
        info=("vllm_config.scheduler_config.max_num_batched_tokens",),
        log=(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)",),
    ),
    "max_num_seqs": Rule(
        "requests in one step at most",
        _whole,
        info=("vllm_config.scheduler_config.max_num_seqs",),
        log=(r"'max_num_seqs': (\d+)",),
    ),
    "async_scheduling": Rule(
        "the next step is scheduled while one runs",
        _flag,
        info=("vllm_config.scheduler_config.async_scheduling",),
        log=((r"Asynchronous scheduling is enabled", True), (r"Asynchronous scheduling is disabled", False)),
    ),
    "hybrid_kv_manager": Rule(
        "hybrid KV-cache manager on; some connectors switch it off",
        _negated,
        info=("vllm_config.scheduler_config.disable_hybrid_kv_cache_manager",),
        log=((r"(?i)turning off hybrid kv cache manager", True),),
    ),
    "attention_backend": Rule(
        "attention backend in use",
        _text,
        info=("vllm_config.attention_config.backend",),
        log=(
            r"Using (\w+) attention backend",
            r"Detected attention backend\(s\) \['(\w+)'",
            r"Using (.+?) backend on V1 engine",
        ),
        order=("log", "server_info"),
    ),
    "model_runner": Rule(
        "`V1` or `V2`",
        _text,
        log=(r"Using (V\d) Model Runner", (r"using the V1 model runner instead", "V1")),
    ),
    "front_end": Rule(
        "what answers HTTP: `python`, or `rust` (VLLM_USE_RUST_FRONTEND)",
        _text,
        log=((r"Launching Rust frontend", "rust"), (r"Starting vLLM (?:API )?server", "python")),
    ),
    "block_size": Rule(
        "tokens in a KV block",
        _whole,
        info=("vllm_config.cache_config.block_size",),
        metric="block_size",
        order=("metrics", "server_info"),
    ),
    "kv_cache_tokens": Rule(
        "KV pool, tokens",
        _whole,
        info=("vllm_config.cache_config.kv_cache_size_tokens",),
        metric="kv_cache_size_tokens",
        log=(r"KV cache size: ([\d,]+) tokens",),
        order=("log", "metrics", "server_info"),
    ),
    "kv_cache_blocks": Rule(
        "KV pool, blocks",
        _whole,
        info=("vllm_config.cache_config.num_gpu_blocks",),
        metric="num_gpu_blocks",
        order=("metrics", "server_info"),
    ),
    "gpu_memory_utilization": Rule(
        "share of the device's memory that it may use; without meaning on CPU",
        _number,
        info=("vllm_config.cache_config.gpu_memory_utilization",),
        metric="gpu_memory_utilization",
        log=(r"'gpu_memory_utilization': ([\d.]+)",),
    ),
    "kv_connector": Rule(
        "KV connector; null: none",
        _text,
        info=("vllm_config.kv_transfer_config.kv_connector",),
        log=(
            r"Creating v1 connector with name: (\w+)",
            r"kv_connector='(\w+)'",
        ),
    ),
    "kv_role": Rule(
        "the connector's role",
        _text,
        info=("vllm_config.kv_transfer_config.kv_role",),
        log=(r"kv_role='(\w+)'",),
    ),
    "kv_buffer_device": Rule(
        "where the connector's buffers are",
        _text,
        info=("vllm_config.kv_transfer_config.kv_buffer_device",),
        log=(r"kv_buffer_device='(\w+)'",),
    ),
}
