# SPDX-License-Identifier: Apache-2.0
"""Memory in use on GPUs, and the wait until an ended engine's memory has come back (pynvml; MiB)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

# Driver bookkeeping moves a little between two sessions; an engine's weights are far more.
SLACK_MIB = 300


def used_mib(devices: Iterable[int]) -> dict[int, int]:
    """Memory in use per device index (in PCI order); devices that NVML does not know are left out."""
    devices = list(devices)
    if not devices:
        return {}
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library: NVML has an exception class per reason
        return {}
    found: dict[int, int] = {}
    try:
        for index in devices:
            try:
                handle: Any = pynvml.nvmlDeviceGetHandleByIndex(index)
                found[index] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) // 2**20
            except pynvml.NVMLError:
                continue
    finally:
        pynvml.nvmlShutdown()
    return found


async def wait_until_back(before: Mapping[int, int], limit_s: float = 60.0) -> dict[int, int]:
    """Wait until no device uses more than `before` (plus slack); return what is held beyond it (MiB)."""
    if not before:
        return {}
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while True:
        now = used_mib(before)
        held = {
            index: used - before[index] for index, used in now.items() if used > before[index] + SLACK_MIB
        }
        if not held or loop.time() > deadline:
            return held
        await asyncio.sleep(0.25)
