# SPDX-License-Identifier: Apache-2.0
"""Types that sections of the config share, and what a config may not say because the plan or the cell says it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from splitbench.secrets import SECRET_NAME

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9+._-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Port = Annotated[int, Field(ge=1024, le=65535)]
# Counts go into columns of 32 bits.
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
# A percentile beyond P99.999 would need 370,000 requests, and so would one below P0.001.
Percentile = Annotated[float, Field(ge=0.001, le=99.999)]

# Flags of `vllm serve` that the plan sets itself; a second opinion in the config would make the plan lie.
OWNED_ARGS = frozenset(
    {
        "api-key",
        "api-server-count",
        "config",  # a file of flags, which would go round all of this
        "data-parallel-address",
        "data-parallel-external-lb",
        "data-parallel-hybrid-lb",
        "data-parallel-rank",
        "data-parallel-rpc-port",
        "data-parallel-size",
        "data-parallel-size-local",
        "data-parallel-start-rank",
        "headless",
        "host",
        "kv-transfer-config",
        "master-addr",
        "master-port",
        "model",
        "nnodes",
        "node-rank",
        "pipeline-parallel-size",
        "port",
        "revision",
        "served-model-name",
        "ssl-certfile",
        "ssl-keyfile",
        "tensor-parallel-size",
        "tokenizer",
        "uds",
    }
)
OWNED_ENV = frozenset(
    {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_MPS_LOG_DIRECTORY",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_VISIBLE_DEVICES",
        "GOMP_CPU_AFFINITY",
        "LMCACHE_CONFIG_FILE",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "VLLM_SERVER_DEV_MODE",
    }
)
# Flags that a field of an engine states too.
MEMORY_ARGS = {"gpu-memory-utilization": "memory_share", "kv-cache-memory-bytes": "kv_cache_bytes"}
# Flags of `vllm bench serve` that the cell sets itself.
OWNED_CLIENT_ARGS = frozenset(
    {
        "append-result",
        "backend",
        "base-url",
        "burstiness",
        "custom-output-len",
        "dataset-name",
        "dataset-path",
        "disable-shuffle",
        "endpoint",
        "header",
        "host",
        "ignore-eos",
        "max-concurrency",
        "metadata",
        "metric-percentiles",
        "model",
        "num-prompts",
        "num-warmups",
        "percentile-metrics",
        "port",
        "prefix-repetition-num-prefixes",
        "prefix-repetition-output-len",
        "prefix-repetition-prefix-len",
        "prefix-repetition-suffix-len",
        "ramp-up-end-rps",
        "ramp-up-start-rps",
        "ramp-up-strategy",
        "random-input-len",
        "random-output-len",
        "random-prefix-len",
        "random-range-ratio",
        "ready-check-timeout-sec",
        "request-id-prefix",
        "request-rate",
        "result-dir",
        "result-filename",
        "save-detailed",
        "save-result",
        "seed",
        "served-model-name",
        "skip-chat-template",
        "temperature",
        "tokenizer",
    }
)


_DEEPEST = 16
"""Levels of lists and mappings in a value that is handed on to an engine."""


def one_or_many(value: Any) -> Any:
    """A list; what is no list becomes the only item of one."""
    return value if isinstance(value, list) else [value]


def _clean(text: str) -> str:
    """Text without control characters other than tabs and line ends: no process, file or terminal takes them.

    Raises:
        ValueError: it holds one, or half of a surrogate pair.
    """
    bad = next((c for c in text if not c.isprintable() and c not in "\t\n" and not c.isspace()), None)
    if bad is not None:
        raise ValueError(f"holds the character {bad!r}; take it out")
    return text


def _plain_data(value: Any, depth: int = 0) -> Any:
    """JSON and nothing else: what a date or .inf would mean to an engine, nobody can say.

    Raises:
        ValueError: it has no form in JSON, or none that ends.
    """
    if depth > _DEEPEST:
        raise ValueError(f"is nested more than {_DEEPEST} levels deep; make it flatter")
    if isinstance(value, str):
        _clean(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or not re.fullmatch(r"[\w./:@+-]+", key):
                raise ValueError(f"{key!r} can't be a key here; use letters, digits and . / : @ + _ -")
            _plain_data(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _plain_data(item, depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} has no form in JSON; give a finite number")
    elif not isinstance(value, bool | int | None):
        raise ValueError(f"{str(value)!r} is a {type(value).__name__}; put it in quotes")
    return value


def _no_flag(text: str) -> str:
    """A word of a command line that no parser takes for a flag.

    Raises:
        ValueError: it begins with a dash and is no number.
    """
    if text.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?([eE][+-]?\d+)?", text):
        raise ValueError(f"'{text}' would be read as a flag; give flags as keys of 'args'")
    return text


def _source_word(text: str) -> str:
    """What names a model or a commit on a hub.

    Raises:
        ValueError: it has characters that neither has.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", text):
        raise ValueError(f"'{text}' names nothing on a hub; use letters, digits and . _ / -")
    return text


def _file_path(path: Path) -> Path:
    _clean(str(path))
    if not path.name:
        raise ValueError("names no file; give its path")
    return path


def _address(text: str) -> str:
    if not re.fullmatch(r"(https?|file)://[^\s\"'<>]+", text) or not text.isprintable():
        raise ValueError(f"'{text}' is no address; begin with https://")
    return text


FilePath = Annotated[Path, AfterValidator(_file_path)]
HubWord = Annotated[str, AfterValidator(_source_word)]
Address = Annotated[str, AfterValidator(_address)]
# Not a union: its error would be a line for each of its kinds.
ArgValue = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                *({"type": kind} for kind in ("boolean", "integer", "number", "string", "null", "object")),
                {
                    "type": "array",
                    "items": {"anyOf": [{"type": kind} for kind in ("integer", "number", "string")]},
                },
            ]
        }
    ),
]
Options = Annotated[dict[str, ArgValue], AfterValidator(_plain_data)]


def _flag_names(owned: frozenset[str]) -> AfterValidator:
    def check(args: dict[str, Any]) -> dict[str, Any]:
        for flag in args:
            if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", flag):
                raise ValueError(
                    f"'{flag}' is not a flag name; write it as 'max-num-seqs', without dashes in front"
                )
            # Parsers take a flag's part behind a dot, its negation, and its beginning for it.
            plain = flag.partition(".")[0].removeprefix("no-")
            if any(name == plain or name.startswith(plain) for name in owned):
                raise ValueError(f"'{flag}' is set by the plan; remove it here")
        _plain_data(args)
        for value in args.values():
            for word in value if isinstance(value, list) else [value]:
                if isinstance(word, str):
                    _no_flag(word)
                elif isinstance(value, list) and not isinstance(word, int | float):
                    raise ValueError("a list of arguments holds numbers and text; change what else is in it")
        return args

    return AfterValidator(check)


def _env_names(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"'{name}' is not a name for an environment variable; use letters, digits and _")
        if name in OWNED_ENV or name.startswith("SPLITBENCH_"):
            raise ValueError(f"'{name}' is set by the plan; remove it here")
        if SECRET_NAME.search(name):
            raise ValueError(
                f"'{name}' looks like a secret, and every config is archived; export it in the shell instead"
            )
        _clean(env[name])
    return env


EngineArgs = Annotated[dict[str, ArgValue], _flag_names(OWNED_ARGS)]
ClientArgs = Annotated[dict[str, ArgValue], _flag_names(OWNED_CLIENT_ARGS)]
EngineEnv = Annotated[dict[str, str], AfterValidator(_env_names)]


class Section(BaseModel):
    """A part of the config: unknown keys are errors, numbers are finite, values don't change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
