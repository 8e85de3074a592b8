# SPDX-License-Identifier: Apache-2.0
"""LMCache's connector with its faults mended, with stand-ins for vLLM's and LMCache's classes: neither is here."""

from __future__ import annotations

import contextlib
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

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        self._lmcache_engine = vllm_config
        self.chunks: list[str] = []
        self.loaded: list[Any] = []

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        self.loaded.append(forward_context)

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
    monkeypatch.delitem(sys.modules, "splitbench.serving.repaired_lmcache", raising=False)
    yield importlib.import_module("splitbench.serving.repaired_lmcache")
    sys.modules.pop("splitbench.serving.repaired_lmcache", None)


def connector(module: ModuleType, gpu: Any, repairs: tuple[str, ...] = ("waited-saves",)) -> Any:
    engine = None if gpu is None else SimpleNamespace(gpu_connector=gpu)
    transfer = SimpleNamespace(
        get_from_extra_config=lambda key, default: {module.KEY: repairs}.get(key, default)
    )
    config = SimpleNamespace(lmcache_engine=engine, kv_transfer_config=transfer)
    return module.LMCacheConnectorV1(config, "worker", None)


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


class Packed:
    """LMCache's GPU connector over vLLM's packed cache: one layer, one head of one number, so a row is (key, value)."""

    def __init__(self, slots: int, kind: str = "packed") -> None:
        self.kvcaches = [SimpleNamespace(device="cuda:0", rows=[[0, 0] for _ in range(slots)])]
        self.store_stream = Stream()
        self.kind, self.page_buffer_size, self.block_size = kind, slots, 16
        self.stock_calls: list[str] = []

    def initialize_kvcaches_ptr(self, **more: Any) -> None:
        pass

    def _initialize_pointers(self, caches: Any) -> Any:
        self.engine_kv_format = self.kind
        return caches

    def to_gpu(self, *_: Any, **__: Any) -> None:
        self.stock_calls.append("to_gpu")

    def from_gpu(self, *_: Any, **__: Any) -> None:
        self.stock_calls.append("from_gpu")


class Chunk:
    """A chunk's memory: keys' plane, then values', as flat numbers."""

    is_cuda = True

    def __init__(self, tokens: int) -> None:
        self.shape = (2, 1, tokens, 1)
        self.flat = [0] * (2 * tokens)

    @property
    def tensor(self) -> Chunk:
        return self

    def view(self, *shape: int) -> Chunk:
        seen = Chunk(0)
        seen.shape, seen.flat = shape, self.flat  # type: ignore[assignment]
        return seen


def kernel(
    chunk: Any, caches: Any, slots: list[int], *rest: Any, skip_prefix_n_tokens: int, **_: Any
) -> None:
    """LMCache's kernel for one row per token and layer."""
    (_, _, direction, kind), (planes, _, tokens, width) = rest, chunk.shape
    assert (planes, kind, len(slots)) == (1, "rows", tokens)
    for token in range(skip_prefix_n_tokens, tokens):
        row = caches[0].rows[slots[token]]
        part = slice(token * width, (token + 1) * width)
        if direction == "D2H":
            chunk.flat[part] = row[:width]
        else:
            row[:width] = chunk.flat[part]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = SimpleNamespace(
        NL_X_NB_BS_NH_TWO_HS="packed", NL_X_NB_NH_BS_TWO_HS="heads first", NL_X_NB_BS_HS="rows"
    )
    ways = SimpleNamespace(H2D="H2D", D2H="D2H")
    c_ops = SimpleNamespace(EngineKVFormat=formats, TransferDirection=ways, multi_layer_kv_transfer=kernel)
    package = ModuleType("lmcache")
    package.c_ops = c_ops  # type: ignore[attr-defined]
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(stream=lambda stream: contextlib.nullcontext())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lmcache", package)
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_whole_rows_arrive_where_they_belong(module: ModuleType, kernels: None) -> None:
    sender, receiver = Packed(32), Packed(64)
    for gpu in (sender, receiver):
        connector(module, gpu, ("packed-kv", "waited-saves")).start_load_kv("step")
    theirs, ours = [9, 4, 30, 2, 17], [50, 3, 22, 63, 8]
    for token, slot in enumerate(theirs):
        sender.kvcaches[0].rows[slot] = [10 + token, -10 - token]
    for start, end in ((0, 3), (3, 5)):
        chunk = Chunk(end - start)
        sender.from_gpu(chunk, start, end, slot_mapping=theirs)
        # What the receiver already has is not written over.
        receiver.to_gpu(chunk, start, end, slot_mapping=ours, vllm_cached_tokens=1)
    assert [receiver.kvcaches[0].rows[slot] for slot in ours] == [
        [0, 0],
        *([10 + n, -10 - n] for n in range(1, 5)),
    ]
    assert sender.stock_calls == receiver.stock_calls == []


def test_other_layouts_are_left_to_lmcache_or_refused(module: ModuleType, kernels: None) -> None:
    planes, heads_first = Packed(8, "planes"), Packed(8, "heads first")
    for gpu in (planes, heads_first):
        module.move_packed_rows(gpu)
    planes.from_gpu(Chunk(1), 0, 1, slot_mapping=[0])
    planes.to_gpu(Chunk(1), 0, 1, slot_mapping=[0])
    assert planes.stock_calls == ["from_gpu", "to_gpu"]
    with pytest.raises(RuntimeError, match="VLLM_KV_CACHE_LAYOUT"):
        heads_first.to_gpu(Chunk(1), 0, 1, slot_mapping=[0])


def test_only_the_named_repairs_are_made(module: ModuleType) -> None:
    gpu = GpuConnector()
    it = connector(module, gpu, ())
    it.chunks = ["a"]
    it.wait_for_save()
    assert gpu.store_stream.queued == ["a[0:256]"]
