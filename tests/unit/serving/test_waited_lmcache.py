# SPDX-License-Identifier: Apache-2.0
"""Saves that are waited for, with stand-ins for vLLM's and LMCache's classes: neither is installed here."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Stream:
    """A stream: work is queued, and done when somebody waits."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self.done: list[str] = []

    def synchronize(self) -> None:
        self.done += self.queued
        self.queued = []


class GpuConnector:
    """As LMCache's: the kernel is launched, not waited for; a batch is one call each."""

    def __init__(self) -> None:
        self.store_stream = Stream()

    def from_gpu(self, chunk: str, start: int, end: int, **more: Any) -> str:
        self.store_stream.queued.append(f"{chunk}[{start}:{end}]")
        return chunk

    def batched_from_gpu(self, chunks: list[str]) -> None:
        for chunk in chunks:
            self.from_gpu(chunk, 0, 256, slot_mapping=None)


class Stock:
    """vLLM's connector around LMCache's engine."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._lmcache_engine = vllm_config
        self.chunks: list[str] = []

    def wait_for_save(self) -> None:
        if self._lmcache_engine.lmcache_engine is not None:
            self._lmcache_engine.lmcache_engine.gpu_connector.batched_from_gpu(self.chunks)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    path = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
    names = path.split(".")
    for depth in range(1, len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[:depth]), ModuleType("package"))
    for name, content in (
        (path, {"LMCacheConnectorV1": Stock}),
        ("vllm.logger", {"init_logger": logging.getLogger}),
    ):
        made = ModuleType(name)
        made.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.delitem(sys.modules, "splitbench.serving.waited_lmcache", raising=False)
    yield importlib.import_module("splitbench.serving.waited_lmcache")
    sys.modules.pop("splitbench.serving.waited_lmcache", None)


def connector(module: ModuleType, gpu: Any) -> Any:
    engine = None if gpu is None else SimpleNamespace(gpu_connector=gpu)
    return module.LMCacheConnectorV1(SimpleNamespace(lmcache_engine=engine), "worker", None)


def test_a_save_is_done_when_it_returns_every_time(module: ModuleType) -> None:
    gpu = GpuConnector()
    it = connector(module, gpu)
    for step in range(3):
        it.chunks = [f"step{step}a", f"step{step}b"]
        it.wait_for_save()
        assert gpu.store_stream.queued == []
    assert len(gpu.store_stream.done) == 6
    # The stock class leaves the work in the queue, which is what this is about.
    stock = GpuConnector()
    stock.batched_from_gpu(["a"])
    assert stock.store_stream.queued == ["a[0:256]"]


def test_each_chunk_is_waited_for_before_the_next_is_launched(module: ModuleType) -> None:
    gpu = GpuConnector()
    depth = []
    launch = gpu.from_gpu
    gpu.from_gpu = lambda *a, **k: (depth.append(len(gpu.store_stream.queued)), launch(*a, **k))[1]  # type: ignore
    it = connector(module, gpu)
    it.chunks = ["a", "b", "c"]
    it.wait_for_save()
    assert depth == [0, 0, 0]


def test_degraded_mode_saves_nothing_and_an_unknown_lmcache_is_refused(module: ModuleType) -> None:
    connector(module, None).wait_for_save()
    with pytest.raises(AttributeError):
        connector(module, SimpleNamespace(from_gpu=lambda: None)).wait_for_save()
