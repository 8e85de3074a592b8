# SPDX-License-Identifier: Apache-2.0
"""Accelerator memory, against a stand-in for the driver's library."""

from __future__ import annotations

import asyncio
import sys
import types

import pytest

from splitbench.serving import gpu_memory

MIB = 2**20


class Driver(types.ModuleType):
    """pynvml with two devices, whose memory use is set by the test; ends come one look later each."""

    class NVMLError(Exception):
        """As in pynvml."""

    def __init__(self, used_mib: dict[int, list[int]]) -> None:
        super().__init__("pynvml")
        self.used_mib = used_mib
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index not in self.used_mib:
            raise self.NVMLError
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:  # noqa: N802
        values = self.used_mib[handle]
        return types.SimpleNamespace(used=(values.pop(0) if len(values) > 1 else values[0]) * MIB)


def test_memory_in_use_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({0: [500], 1: [60_000]})
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert gpu_memory.used_mib([0, 1, 7]) == {0: 500, 1: 60_000}
    assert gpu_memory.used_mib([]) == {}
    assert driver.open == 0


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({})

    def broken() -> None:
        raise driver.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(driver, "nvmlInit", broken)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert gpu_memory.used_mib([0]) == {}
    assert asyncio.run(gpu_memory.wait_until_back({})) == {}


def test_the_wait_ends_when_memory_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({0: [61_000, 30_000, 700], 1: [500]})
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert asyncio.run(gpu_memory.wait_until_back({0: 500, 1: 500}, limit_s=30)) == {}
    assert driver.used_mib[0] == [700]


def test_what_is_not_given_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver({0: [60_500], 1: [500]}))
    assert asyncio.run(gpu_memory.wait_until_back({0: 500, 1: 500}, limit_s=0.3)) == {0: 60_000}
