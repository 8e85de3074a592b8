# SPDX-License-Identifier: Apache-2.0
"""Layouts: engines, the devices that they occupy, and how they are joined."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, model_validator

from splitbench.experiment.fields import (
    MEMORY_ARGS,
    EngineArgs,
    EngineEnv,
    NonNegativeInt,
    Options,
    Port,
    PositiveInt,
    Section,
    one_or_many,
)
from splitbench.serving.plan import MAX_NODES, Connector, FirstToken, Router


class EngineDefaults(Section):
    """What engines are started with; experiment, layout and engine level are merged in this order."""

    args: EngineArgs = Field(default_factory=dict, description="extra flags of `vllm serve`, without dashes")
    env: EngineEnv = Field(default_factory=dict, description="environment variables")
    startup_limit_s: PositiveFloat | None = Field(None, description="how long an engine may take to be ready")


class MpsShare(Section):
    """A part of a GPU's compute units, kept apart by CUDA MPS."""

    mps_percent: Annotated[int, Field(ge=1, le=100)] = Field(
        description="share of the GPU's compute units; of all engines on a GPU at most 100"
    )


class EngineSpec(EngineDefaults):
    """One engine: the devices it occupies and how it spreads over them."""

    cores: list[NonNegativeInt] | None = Field(None, min_length=1, description="CPU cores (CPU stack)")
    gpus: list[NonNegativeInt] | None = Field(None, min_length=1, description="GPU indices (CUDA stack)")
    node: Annotated[int, Field(ge=0, lt=MAX_NODES)] = Field(
        0, description="which node of a SLURM allocation has them; 0 is where client and proxy run"
    )
    tp: PositiveInt | None = Field(None, description="tensor parallel size; default: all GPUs given")
    pp: PositiveInt = Field(1, description="pipeline parallel size")
    dp: PositiveInt = Field(1, description="data parallel size")
    memory_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of each GPU's memory (vLLM's gpu-memory-utilization)"
    )
    kv_cache_bytes: Annotated[int, Field(gt=0, lt=2**63)] | None = Field(
        None, description="size of the KV pool on each GPU, instead of what memory_share leaves"
    )
    share: MpsShare | Literal["time-sliced"] | None = Field(
        None,
        description="the GPUs are shared with other engines: by CUDA MPS, or in turns as the driver gives them",
    )
    port: Port | None = Field(None, description="fixed HTTP port; default: counted from node.base_port")

    @model_validator(mode="after")
    def _devices(self) -> Self:
        if (self.cores is None) == (self.gpus is None):
            raise ValueError("give exactly one of 'cores' and 'gpus'")
        devices = self.devices
        if len(set(devices)) != len(devices):
            raise ValueError(f"a device is named twice in {devices}")
        if self.gpus is not None and self.parallel != len(devices):
            raise ValueError(
                f"tp x pp x dp is {self.parallel} but {len(devices)} GPUs are given; make them equal"
            )
        if self.cores is not None and self.parallel != 1:
            raise ValueError("on CPU cores tp, pp and dp must be 1; start replicas instead")
        if self.share is not None and self.cores is not None:
            raise ValueError("'share' is for GPUs; give each engine cores of its own")
        for flag, key in MEMORY_ARGS.items():
            if flag in self.args and getattr(self, key) is not None:
                raise ValueError(f"memory is stated twice, by '{key}' and by args '{flag}'; keep one")
        return self

    @property
    def devices(self) -> list[int]:
        """Device indices, cores or GPUs."""
        return list(self.cores if self.cores is not None else self.gpus or [])

    @property
    def places(self) -> list[tuple[int, int]]:
        """Node and index of every device."""
        return [(self.node, device) for device in self.devices]

    @property
    def states_memory(self) -> bool:
        """Whether its part of a GPU's memory is stated, by field or by flag."""
        return any(
            getattr(self, key) is not None or self.args.get(flag) is not None
            for flag, key in MEMORY_ARGS.items()
        )

    @property
    def tensor_parallel(self) -> int:
        """Tensor parallel size with its default filled in."""
        if self.tp is not None:
            return self.tp
        return 1 if self.cores is not None else max(1, len(self.devices) // (self.pp * self.dp))

    @property
    def parallel(self) -> int:
        """Number of ranks."""
        return self.tensor_parallel * self.pp * self.dp


class AggregatedLayout(EngineSpec):
    """One engine that does prefill and decode."""

    kind: Literal["aggregated"] = Field(description="one engine that does prefill and decode")

    def engines(self) -> list[EngineSpec]:
        """The layout's engines."""
        return [self]


ROUTER = "the front door; vllm-router must be installed beside vLLM"
TRACE = "the proxy writes a line per request into the session's logs: when each stage was reached"


class ReplicasLayout(EngineDefaults):
    """Several equal aggregated engines behind a round-robin front."""

    kind: Literal["replicas"] = Field(description="equal engines behind a round-robin front")
    replicas: Annotated[list[EngineSpec], Field(min_length=2, description="the engines, two or more")]
    router: Router = Field("builtin", description=ROUTER)
    trace: bool = Field(False, description=TRACE)

    @model_validator(mode="after")
    def _trace_of_ours(self) -> Self:
        if self.trace and self.router != "builtin":
            raise ValueError("only the built-in proxy writes a trace; use router builtin")
        return self

    def engines(self) -> list[EngineSpec]:
        """The layout's engines."""
        return list(self.replicas)


def is_spread(engines: Iterable[EngineSpec]) -> bool:
    """Whether engines are on more than the node of the client."""
    return any(engine.node for engine in engines)


Engines = Annotated[list[EngineSpec], BeforeValidator(one_or_many), Field(min_length=1)]


class PdLayout(EngineDefaults):
    """Prefill engines and decode engines with a proxy in front."""

    kind: Literal["pd"] = Field(description="prefill and decode on engines of their own")
    connector: Connector = Field(description="how KV cache moves from prefill to decode")
    prefill: Engines = Field(description="one engine or a list: those that compute prompts")
    decode: Engines = Field(description="one engine or a list: those that make the tokens")
    first_token: FirstToken | None = Field(
        None, description="who makes the first token; default by connector"
    )
    kv_buffer_device: Literal["cpu", "cuda"] | None = Field(
        None, description="where transfer buffers live; default: with the engine"
    )
    kv_buffer_gb: PositiveFloat = Field(
        2.0,
        description="LMCache's memory in GiB: the transfer buffer per rank, or (lmcache-mp) the whole cache",
    )
    kv_chunk_tokens: PositiveInt | None = Field(
        None, description="tokens in a chunk of lmcache-mp; default: 256, on cores 128 (vLLM's block there)"
    )
    connector_options: Options = Field(
        default_factory=dict, description="further keys of vLLM's kv_connector_extra_config"
    )
    lmcache_options: Options = Field(
        default_factory=dict, description="further keys of LMCache's own config file"
    )
    lmcache_repairs: list[Literal["packed-kv", "waited-saves"]] = Field(
        default_factory=list,
        description="faults of LMCache's in-process connector to mend: 'packed-kv' moves whole rows under vLLM 0.26 "
        "and later, where LMCache up to 0.5.4 loses half of them; 'waited-saves' waits until KV is in a transfer "
        "buffer on the GPU, which LMCache does not and which goes wrong where GPUs are shared",
    )
    router: Router = Field("builtin", description=ROUTER)
    trace: bool = Field(False, description=TRACE)

    @model_validator(mode="after")
    def _first_token_of_connector(self) -> Self:
        if self.connector == "nixl" and self.first_token == "prefiller":
            raise ValueError(f"connector '{self.connector}' always takes the first token from the decoder")
        if self.router == "vllm-router" and self.connector != "nixl":
            raise ValueError(f"router 'vllm-router' does not serve connector '{self.connector}'; use builtin")
        if self.trace and self.router != "builtin":
            raise ValueError("only the built-in proxy writes a trace; use router builtin")
        if self.connector == "lmcache":
            self._ranks_pair_up()
        elif self.lmcache_options or self.lmcache_repairs:
            raise ValueError(
                f"connector '{self.connector}' has no 'lmcache_options', 'lmcache_repairs'; remove them"
            )
        return self

    def _ranks_pair_up(self) -> None:
        """A sender's rank picks the receiver's ports by its own number, so each needs a partner."""
        if any(engine.pp > 1 or engine.dp > 1 for engine in self.engines()):
            raise ValueError("over connector 'lmcache' pp and dp must be 1; give more engines instead")
        senders = max(engine.tensor_parallel for engine in self.prefill)
        receivers = min(engine.tensor_parallel for engine in self.decode)
        if senders > receivers:
            raise ValueError(
                f"over connector 'lmcache' {senders} prefill ranks have only {receivers} decode ranks to send to; "
                "make tp of decode at least that of prefill, or use nixl"
            )

    def engines(self) -> list[EngineSpec]:
        """The layout's engines, prefill first."""
        return [*self.prefill, *self.decode]


Layout = Annotated[AggregatedLayout | ReplicasLayout | PdLayout, Field(discriminator="kind")]
