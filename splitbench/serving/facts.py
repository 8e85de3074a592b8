# SPDX-License-Identifier: Apache-2.0
"""What each engine says about itself once it is up: `engine_facts.json`, one entry per engine.

Three sources, asked in an order that each fact has of its own: `/server_info` (vLLM's effective configuration;
only there with VLLM_SERVER_DEV_MODE, which plans set), `/metrics` (its cache_config_info) and the engine's log.
A fact that no source states is null; nothing is guessed. The shape is in docs/results.md.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from splitbench.serving import readiness
from splitbench.serving.fact_rules import RULES, Rule

FORMAT = 1
FILE = "engine_facts.json"
LOG_BYTES = (
    8 * 2**20
)  # facts are in what an engine writes while it starts; a log without end is not read to its end
INFO_LIMIT_S = 120.0  # its first answer lists packages and devices, by programs that it runs

_CAPTURE = re.compile(r"Capturing CUDA graphs \((?:[^)]*, )?(PIECEWISE|FULL)\)")
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_facts(*, log: str, metrics: str = "", server_info: Any = None) -> dict[str, dict[str, Any]]:
    """Every fact of `RULES` about one engine, as `{fact: {"value": ..., "source": ...}}`.

    Args:
        log: what the engine has written so far.
        metrics: its /metrics page; empty where there is none.
        server_info: its /server_info answer, decoded; the configuration may be a mapping (asked for as JSON) or
            the text that older versions give. None where there is none.
    """
    info = server_info if isinstance(server_info, Mapping) else {}
    labels: dict[str, str] = {}
    for match in _CACHE_INFO.finditer(metrics):
        labels = dict(_LABEL.findall(match[1])) | labels  # of several data-parallel ranks, the first
    config = info.get("vllm_config")
    text = f"with config: {config}" if isinstance(config, str) else ""

    def found(rule: Rule) -> Iterator[tuple[Any, str]]:
        for source in rule.order:
            if source == "server_info":
                yield from _in_info(rule, info, text)
            elif source == "log":
                yield from _in_log(rule, log)
            elif rule.metric in labels:
                yield labels[rule.metric], source

    return {name: _first(rule, found(rule)) for name, rule in RULES.items()} | _captured(log, info)


def _first(rule: Rule, found: Iterable[tuple[Any, str]]) -> dict[str, Any]:
    for raw, source in found:
        value = rule.convert(raw)
        if value is not None:
            return {"value": value, "source": source}
    return {"value": None, "source": None}


def _in_info(rule: Rule, info: Mapping[str, Any], text: str) -> Iterator[tuple[Any, str]]:
    for path in rule.info:
        value: Any = info
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            yield value, "server_info"
    if text:
        yield from ((value, "server_info") for value, _ in _in_log(rule, text))


def _in_log(rule: Rule, log: str) -> Iterator[tuple[Any, str]]:
    for entry in rule.log:
        pattern, fixed = entry if isinstance(entry, tuple) else (entry, None)
        match = re.search(pattern, log, re.MULTILINE)
        if match is not None:
            line = log.count("\n", 0, match.start()) + 1
            yield (match[1] if fixed is None else fixed), f"log:{line}"


def _captured(log: str, info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Graphs that the log shows being captured, where the configuration does not tell their mode."""
    kinds = {match[1] for match in _CAPTURE.finditer(log)}
    if not kinds or isinstance(info.get("vllm_config"), Mapping) or "'cudagraph_mode': <" in log:
        return {}
    mode = "full_and_piecewise" if len(kinds) == 2 else kinds.pop().lower()
    first = _CAPTURE.search(log)
    assert first is not None
    line = log.count("\n", 0, first.start()) + 1
    return {"cuda_graphs": {"value": mode, "source": f"log:{line}"}}


def read_start_of_log(path: Path) -> str:
    """The first `LOG_BYTES` of an engine's log; empty when there is none."""
    try:
        with path.open("rb") as handle:
            return handle.read(LOG_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


async def ask_engine(part: Mapping[str, Any], log: Path) -> dict[str, Any]:
    """The facts of an engine that is up.

    Args:
        part: its part of the plan (`name`, `role`, `host`, `port`, `devices`).
        log: its log.
    """
    host, port = str(part["host"]), int(part["port"])
    info, metrics = await asyncio.gather(
        readiness.ask(host, port, "/server_info?config_format=json", limit_s=INFO_LIMIT_S),
        readiness.ask(host, port, "/metrics", limit_s=30.0),
    )
    facts = read_facts(
        log=read_start_of_log(log),
        metrics=metrics.text if metrics.status == 200 else "",
        server_info=info.json() if info.status == 200 else None,
    )
    return {"role": part["role"], "devices": list(part["devices"]), "facts": facts}


def fact_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the `engine_facts` table (without `cell_id`) from the content of an `engine_facts.json`."""
    rows = []
    for engine, entry in content["engines"].items():
        for name, fact in entry["facts"].items():
            value = fact["value"]
            number = float(value) if isinstance(value, int | float) else None
            text = value if isinstance(value, str) or value is None else json.dumps(value)
            rows.append(
                {
                    "engine": engine,
                    "role": entry["role"],
                    "fact": name,
                    "value": text,
                    "number": number,
                    "evidence": fact["source"],
                }
            )
    return rows
