# SPDX-License-Identifier: Apache-2.0
"""How two environments differ, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from splitbench.environment.probe import compared, environment_digest
from splitbench.errors import UserError
from splitbench.files import read_json

_LABELS = {
    "machine.system.os": "operating system",
    "machine.system.kernel": "kernel",
    "machine.cpu.model": "processor",
    "machine.cpu.cores_usable": "usable cores",
    "machine.memory.total_gib": "memory in GiB",
    "machine.driver.version": "GPU driver",
    "machine.driver.cuda": "CUDA of the driver",
    "machine.cuda.nvcc": "CUDA toolkit",
    "machine.fabric_manager.package": "fabric manager",
    "machine.ucx.system": "the system's UCX",
    "software.python": "Python that serves",
    "software.torch.cuda": "torch's CUDA",
}


def read_environment(path: Path) -> dict[str, Any]:
    """A record from a file, or the newest one below a folder of results.

    Raises:
        UserError: there is none.
    """
    if path.is_dir():
        found = sorted(path.glob("**/environment/probe-*.json"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise UserError(
                "no record of an environment below it", where=str(path), mend="run the workflow there"
            )
        path = found[-1]
    try:
        record = read_json(path)
        if not isinstance(record.get("machine"), Mapping):
            raise ValueError("no machine in it")
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), mend="check the path") from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"no record of an environment ({error})", where=str(path), mend="name another file"
        ) from None
    return record


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What differs between two environments, a line each; what changes by itself and what is private is left out."""
    left, right = dict(_flat(_comparable(a))), dict(_flat(_comparable(b)))
    lines = []
    for key in sorted({*left, *right}, key=_rank):
        if left.get(key) != right.get(key):
            lines.append(_words(key, left.get(key), right.get(key)))
    if not lines and environment_digest(a) != environment_digest(b):
        lines.append("the records have different forms; probe both machines with the same version")
    return lines


def _comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    if "schema" in record:
        return compared(record)
    packages = (record.get("serving") or {}).get("packages")
    return {"machine": record.get("machine"), "software": {"packages": packages}}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(part, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        for index, part in enumerate(value):
            yield from _flat(part, f"{path}.{part.get('index', part.get('name', index))}")
    else:
        yield path, value


def _rank(key: str) -> tuple[int, str]:
    known = list(_LABELS)
    if key in known:
        return known.index(key), key
    return len(known) + (1 if ".packages." in key else 0), key


def _words(key: str, left: Any, right: Any) -> str:
    label = _LABELS.get(key)
    if label is None:
        label = key.removeprefix("machine.").removeprefix("software.")
        for section, noun in (
            ("machine.packages.", "system package "),
            ("software.packages.", "Python package "),
        ):
            if key.startswith(section):
                label = noun + key.removeprefix(section)
        if label.startswith("gpus."):
            _, index, fact = label.split(".", 2)
            label = f"GPU {index} {fact}"
    if left is None:
        return f"{label}: only in B ({_shown(right)})"
    if right is None:
        return f"{label}: only in A ({_shown(left)})"
    return f"{label}: {_shown(left)} in A, {_shown(right)} in B"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
