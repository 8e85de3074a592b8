# SPDX-License-Identifier: Apache-2.0
"""Workloads: what a request looks like, how requests arrive, and how many are sent."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from splitbench.experiment.fields import (
    ClientArgs,
    FilePath,
    NonNegativeInt,
    Percentile,
    PositiveInt,
    Section,
)


class Prompts(Section):
    """How many prompts a cell sends."""

    per_concurrency: PositiveInt = Field(10, description="prompts per unit of concurrency")
    minimum: PositiveInt = Field(1, description="but never fewer than this")
    percentile: Percentile | None = Field(
        None, description="nor fewer than one cell needs for an interval around this percentile (P99: 368)"
    )


class Ramp(Section):
    """An offered rate that changes while it is measured."""

    strategy: Literal["linear", "exponential"] = Field(
        "linear", description="how it gets from one to the other"
    )
    start_rate: PositiveInt = Field(description="requests per second at first")
    end_rate: PositiveInt = Field(description="requests per second at last")


FILE_DATASETS = ("sharegpt", "sonnet", "custom")


class Workload(Section):
    """What a request looks like and how requests arrive."""

    dataset: Literal["random", "prefix-repetition", "sharegpt", "sonnet", "custom"] = Field(
        "random",
        description="made-up tokens, made-up tokens with shared beginnings, a file in ShareGPT's form, a text file "
        "whose lines make up prompts, or JSON lines with a `prompt` each",
    )
    input_tokens: PositiveInt = Field(description="tokens per prompt; of files the typical number")
    output_tokens: PositiveInt = Field(description="tokens per answer; of ShareGPT files the typical number")
    path: FilePath | None = Field(None, description="the file of a dataset that is one")
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None, description="of that file: results are keyed by what it holds, not by where it lies"
    )
    range_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="random: lengths are drawn from this much below to this much above"
    )
    prefix_tokens: NonNegativeInt = Field(
        0, description="of input_tokens, those that prompts share at the start"
    )
    prefixes: PositiveInt | None = Field(None, description="prefix-repetition: number of distinct beginnings")
    request_rate: PositiveFloat | None = Field(
        None, description="offered requests per second (open loop); default: as fast as concurrency allows"
    )
    burstiness: PositiveFloat = Field(
        1.0, description="shape of the gaps at a finite rate: 1 is Poisson, below it comes in bursts"
    )
    ramp: Ramp | None = Field(None, description="a rate that changes, instead of request_rate")
    concurrency: Annotated[list[PositiveInt], Field(min_length=1)] | None = Field(
        None,
        description="caps for this workload instead of the matrix's; a high one leaves an open loop open",
    )
    prompts: Prompts = Field(Prompts(), description="how many prompts a cell sends")
    warmup_per_concurrency: NonNegativeInt = Field(
        1, description="warm-up requests per unit of concurrency, with prompts that are not measured"
    )
    extra_args: ClientArgs = Field(default_factory=dict, description="further flags of `vllm bench serve`")

    @model_validator(mode="after")
    def _fields_of_the_dataset(self) -> Self:
        is_file = self.dataset in FILE_DATASETS
        if is_file and (self.path is None or self.sha256 is None):
            raise ValueError(
                f"dataset '{self.dataset}' is a file: give 'path' and its 'sha256' (sha256sum FILE)"
            )
        if not is_file and (self.path is not None or self.sha256 is not None):
            raise ValueError(f"dataset '{self.dataset}' reads no file; remove 'path' and 'sha256'")
        if self.range_ratio and self.dataset != "random":
            raise ValueError(f"'range_ratio' is for dataset 'random', not '{self.dataset}'")
        if (self.prefixes is not None) != (self.dataset == "prefix-repetition"):
            raise ValueError("'prefixes' and dataset 'prefix-repetition' go together")
        if self.prefix_tokens and is_file:
            raise ValueError(f"'prefix_tokens' is for made-up prompts, not for dataset '{self.dataset}'")
        if self.prefix_tokens >= self.input_tokens:
            raise ValueError(
                f"prefix_tokens {self.prefix_tokens} leaves nothing of {self.input_tokens} input tokens"
            )
        return self

    @model_validator(mode="after")
    def _one_arrival(self) -> Self:
        if self.ramp is not None and self.request_rate is not None:
            raise ValueError("give 'request_rate' or 'ramp', not both")
        if self.burstiness != 1.0 and self.request_rate is None and self.ramp is None:
            raise ValueError("'burstiness' shapes the gaps of a finite rate: give 'request_rate' or 'ramp'")
        return self
