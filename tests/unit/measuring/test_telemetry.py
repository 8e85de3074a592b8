# SPDX-License-Identifier: Apache-2.0
"""Sampling of processes, processors and GPUs, and what the client leaves about its event loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitbench.measuring.around import lateness_series, loop_lateness, read_ticks
from splitbench.measuring.client import ticks_file
from splitbench.measuring.evidence import Series
from splitbench.measuring.gpus import Gpus
from splitbench.measuring.telemetry import Sampler, from_json, gauges, members, to_json

BURN = "import time, os\nprint(os.getpid(), flush=True)\nwhile True: pass"


def values(series: list[Series], source: str, metric: str) -> list[float]:
    return [value for one in series if (one.source, one.metric) == (source, metric) for value in one.values]


def test_a_busy_process_is_seen_and_is_not_somebody_else() -> None:
    with subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE) as burner:
        assert burner.stdout is not None
        burner.stdout.readline()
        sampler = Sampler({"engine:engine-0": burner.pid}, ours=[os.getpid()], interval_s=0.1)
        sampler.start()
        time.sleep(0.8)
        series = sampler.stop()
        burner.send_signal(signal.SIGSTOP)
        os.waitpid(burner.pid, os.WUNTRACED)
        held = Sampler({"engine:engine-0": burner.pid}, interval_s=60)
        held.start()
        stopped = held.stop()
        burner.kill()
    assert values(series, "engine:engine-0", "stopped_processes") == []
    assert values(stopped, "engine:engine-0", "stopped_processes") == [1]
    busy = values(series, "engine:engine-0", "cpu_percent")
    assert len(busy) >= 3
    assert 5 < max(busy) < 150
    assert min(values(series, "engine:engine-0", "rss_mib")) > 1
    for metric in ("cpu_percent", "others_cpu_percent", "steal_percent"):
        found = values(series, "host", metric)
        assert found
        assert all(0 <= value <= 100 * (os.cpu_count() or 1) + 50 for value in found)
    assert from_json(to_json(series)) == series


def test_a_client_that_starts_later_and_ends_early() -> None:
    with subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE) as burner:
        sampler = Sampler({}, interval_s=60)
        sampler.watch_client(burner.pid)
        sampler.sample()
        time.sleep(0.3)
        sampler.sample()
        burner.kill()
        burner.wait()
        sampler.sample()
        sampler.start()
        assert len(values(sampler.stop(), "client", "cpu_percent")) == 1


def test_servers_are_asked_no_more_often_than_wanted() -> None:
    asked = []

    def scrape() -> dict[str, dict[str, float]]:
        asked.append(time.perf_counter())
        return {
            "proxy": {"splitbench_proxy_in_flight": 3.0},
            "engine:e": {'vllm:num_requests_running{a="1"}': 2.0},
        }

    sampler = Sampler({}, interval_s=0.02, scrape=scrape, scrape_interval_s=0.2)
    sampler.start()
    time.sleep(0.5)
    series = sampler.stop()
    assert 2 <= len(asked) <= 3
    assert values(series, "engine:e", "num_requests_running") == [2.0] * len(asked)
    assert values(series, "proxy", "splitbench_proxy_in_flight") == [3.0] * len(asked)


def test_gauges_are_summed_over_labels() -> None:
    found = gauges(
        {'vllm:num_requests_running{e="0"}': 1.0, 'vllm:num_requests_running{e="1"}': 2.0, "vllm:x": 9.0}
    )
    assert found == [("num_requests_running", 3.0)]


def test_members_of_a_process_that_is_gone() -> None:
    assert members(2**22 + 1) == []


class Nvml:
    """As much of NVML as a machine with two GPUs would show."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 0, 1, 0

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return 1980 - 100 * handle - kind

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:  # noqa: N802
        return 0x40

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=2**22 + 1)]


def test_gpus_state_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    gpus = Gpus.of([0, 1])
    assert gpus is not None
    found = {(index, metric): value for index, metric, value in gpus.sample()}
    assert found[0, "sm_clock_mhz"] == 1980
    assert found[1, "throttle_reasons"] == 0x40
    assert (0, "power_w") not in found
    assert gpus.foreign([os.getpid()]) == []
    (line, _) = gpus.foreign([])
    assert line.startswith(f"GPU 0: process {os.getpid()} (")
    # The server of MPS goes on when the program that started it has ended; its process group still says whose it is.
    assert gpus.foreign([], groups=[os.getpgid(0)]) == []


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus.of([0]) is None
    assert Gpus.of([]) is None


def test_lateness_of_the_clients_loop(tmp_path: Path) -> None:
    path = ticks_file(tmp_path / "a.client.log")
    assert read_ticks(path) == []
    path.write_text("[[10.0, 0.5], [11.2, 0.001], [11.9, 0.002], [12.1, 0.003]]")
    ticks = read_ticks(path)
    assert not path.exists()
    found = loop_lateness(ticks, 11.0, 12.0)
    assert found == {"ticks": 2.0, "p50_ms": 1.0, "p99_ms": 2.0, "max_ms": 2.0}
    assert loop_lateness(ticks, 20.0, 30.0) is None
    (series,) = lateness_series(ticks, 10.0)
    assert (list(series.times_s), list(series.values)) == ([0.0, 1.0, 2.0], [500.0, 2.0, 3.0])
    path.write_text("[[10.0, 0.")
    assert read_ticks(path) == []
