# SPDX-License-Identifier: Apache-2.0
"""How a stubbed engine behaves: its timing, and the ways in which it goes wrong.

Three sources, later ones win: the defaults below, a JSON file (`$VLLM_STUB_FILE`, else `vllm_stub.json` in
the prefix of the interpreter's environment), and the environment (`VLLM_STUB_STARTUP_S=0.5`). The file may
hold `{"all": {...}, "7200": {...}}`: what is under a port counts for the engine on that port only.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass
class Behaviour:
    """Every switch of the stub; times as their names say."""

    startup_s: float = 0.0
    prefill_us_per_token: float = 10.0
    step_ms: float = 0.5
    block_size: int = 16
    journal: str = ""  # file that gets one line per start and per end that the stub itself sees
    core: bool = False  # fork a child like vLLM's EngineCore; the server ends when it dies
    children: int = 0  # double-forked children with their own OS session: they outlive a careless stop
    ignore_term: bool = False  # the server and its children do not react to SIGTERM
    die_early: str = ""  # log this line and exit with code 1 before serving
    hang_start: bool = False  # never serve
    die_after_requests: int = -1  # kill itself when this many completions have been started
    fail_requests: bool = False  # answer 500 to every completion
    fail_health: bool = False  # answer 503 to /health
    fail_health_file: str = ""  # answer 503 to /health while this file exists
    served_name: str = ""  # pretend to serve another model
    log_mib: int = 0  # write this much log before serving
    log_lines: int = 0  # write this many lines before serving
    log_line_kib: int = 0  # and then one of this length
    log_forever: bool = False  # and never stop writing
    litter: bool = False  # leave a socket, a temporary file and shared memory, as a killed vLLM does
    take_port: int = 0  # a child of the engine holds this port as well
    broken_transfer: bool = False  # a decoder reports hits and loads nothing
    broken_after: int = -1  # so does it from this many transfers on


def _convert(kind: object, value: object) -> object:
    if kind == "bool":
        return value if isinstance(value, bool) else str(value).lower() in ("1", "true", "yes")
    return {"float": float, "int": int, "str": str}[str(kind)](value)  # type: ignore[arg-type]


def behaviour(port: int) -> Behaviour:
    """Read the behaviour of the engine on `port`."""
    wanted: dict[str, object] = {}
    path = Path(os.environ.get("VLLM_STUB_FILE") or Path(sys.prefix) / "vllm_stub.json")
    if path.is_file():
        stored = json.loads(path.read_text())
        wanted.update(stored.get("all", {}))
        wanted.update(stored.get(str(port), {}))
    for field in fields(Behaviour):
        name = f"VLLM_STUB_{field.name.upper()}"
        if name in os.environ:
            wanted[field.name] = os.environ[name]
    kinds = {field.name: field.type for field in fields(Behaviour)}
    unknown = sorted(set(wanted) - set(kinds))
    if unknown:
        raise SystemExit(f"vllm stub: unknown behaviour {', '.join(unknown)}")
    return Behaviour(**{name: _convert(kinds[name], value) for name, value in wanted.items()})  # type: ignore[arg-type]
