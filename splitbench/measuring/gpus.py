# SPDX-License-Identifier: Apache-2.0
"""GPUs as the driver sees them (NVML); everything here is empty on a machine without them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import psutil


class Gpus:
    """The GPUs of a layout.

    Args:
        indices: which ones, as nvidia-smi counts them.

    Use `Gpus.of`, which knows whether there is a driver to ask.
    """

    def __init__(self, nvml: Any, indices: Sequence[int]) -> None:
        self._nvml = nvml
        self._handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in indices}

    @classmethod
    def of(cls, indices: Sequence[int]) -> Gpus | None:
        """The GPUs, or None where nvidia-ml-py or a driver is not there."""
        if not indices:
            return None
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            return cls(nvml, indices)
        except Exception:  # NVML has error classes of its own, and which exist differs by version
            return None

    def sample(self) -> Iterator[tuple[int, str, float]]:
        """Index, metric and value of everything that a GPU states."""
        nvml = self._nvml
        asked: dict[str, Any] = {
            "sm_clock_mhz": lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_MEM),
            "power_w": lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1e3,
            "temperature_c": lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU),
            "memory_used_mib": lambda h: nvml.nvmlDeviceGetMemoryInfo(h).used / 2**20,
            "utilisation_percent": lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu,
            "throttle_reasons": self._throttle_reasons,
        }
        for index, handle in self._handles.items():
            for metric, ask in asked.items():
                try:
                    yield index, metric, float(ask(handle))
                except Exception:  # a GPU need not know each of these; the others still count
                    continue

    def _throttle_reasons(self, handle: Any) -> int:
        # Renamed from "throttle" to "event" in newer versions.
        ask = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        ask = ask or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        return int(ask(handle))

    def foreign(self, ours: Iterable[int], groups: Collection[int] = ()) -> list[str]:
        """Processes on these GPUs that are not ours, in words.

        Args:
            ours: processes.
            groups: process groups; who is in one belongs to us, though its parent may have ended.
        """
        known = set(ours)
        found = []
        for index, handle in self._handles.items():
            try:
                processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except Exception:
                continue
            for process in processes:
                # In a container the driver may number processes as the host does: then nothing can be said.
                if process.pid in known or _group(process.pid) in groups:
                    continue
                if psutil.pid_exists(process.pid):
                    found.append(f"GPU {index}: process {process.pid} ({_name(process.pid)}) is not ours")
        return found


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "gone"
