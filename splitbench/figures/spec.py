# SPDX-License-Identifier: Apache-2.0
"""What a figure shows: the slice of the config that one picture depends on, and nothing else."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

FigureName = Literal[
    "itl_by_concurrency",
    "itl_of_layouts",
    "ttft_of_layouts",
    "second_token_of_layouts",
    "itl_tail_by_concurrency",
    "itl_tail_of_layouts",
    "handoff_gap_by_concurrency",
    "itl_against_concurrency",
    "ttft_against_concurrency",
    "interference",
    "goodput",
    "cost",
    "throughput_interactivity",
    "variance_split",
    "break_even",
    "telemetry",
]
FIGURE_NAMES: tuple[FigureName, ...] = get_args(FigureName)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Window(_Frozen):
    """The part of the axes that is drawn; what is left out is chosen from the data, with every tail inside.

    `y` limits are shares between 0 and 1 (for tails: the top of the CDF, such as 0.9 to 1). `x_scale: auto`
    takes a logarithmic axis where the largest value is far above the medians.
    """

    x_min_ms: float | None = Field(default=None, ge=0, description="left end of the latency axis")
    x_max_ms: float | None = Field(default=None, gt=0, description="right end of the latency axis")
    y_min: float = Field(
        default=0.0, ge=0, lt=1, description="lower end of the share of values (0.9: the tail)"
    )
    y_max: float = Field(default=1.0, gt=0, le=1, description="upper end of the share of values")
    x_scale: Literal["auto", "linear", "log"] = Field(
        default="auto", description="auto: logarithmic where tails are far from medians"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Window:
        if self.x_min_ms is not None and self.x_max_ms is not None and self.x_min_ms >= self.x_max_ms:
            raise ValueError(f"x_min_ms ({self.x_min_ms:g}) must be below x_max_ms ({self.x_max_ms:g})")
        if self.y_min >= self.y_max:
            raise ValueError(f"y_min ({self.y_min:g}) must be below y_max ({self.y_max:g})")
        if self.x_scale == "log" and self.x_min_ms == 0:
            raise ValueError("x_min_ms must be above 0 on a logarithmic axis")
        return self


class Limits(_Frozen):
    """What a request has to keep: TTFT, and the P99 of its own ITLs (milliseconds); None is no limit."""

    itl_ms: float | None = None
    ttft_ms: float | None = None

    @property
    def words(self) -> str:
        """`own P99 ITL <= 30 ms, TTFT <= 500 ms`; empty without a limit."""
        parts = []
        if self.itl_ms is not None:
            parts.append(f"own P99 ITL <= {self.itl_ms:g} ms")
        if self.ttft_ms is not None:
            parts.append(f"TTFT <= {self.ttft_ms:g} ms")
        return ", ".join(parts)


class FigureSpec(_Frozen):
    """One figure of one workload.

    Args:
        figure: which picture.
        workload: whose cells.
        layouts: which layouts, in this order; empty: all, aggregated first.
        concurrency: for figures at one concurrency; None: the highest that every layout has.
        concurrencies: for figures over concurrencies; empty: all.
        window: the part of the axes that is drawn.
        percentiles: marked on every curve, in percent.
        slo_ms: drawn as a line where the figure has that latency's axis; None: no line.
        limits: the SLO, for goodput and cost; None: every answered request counts.
        price_per_hour, currency: of one accelerator, for cost; None: cost is given in accelerator hours.
        margin_percent: shaded around zero where changes are drawn; None: no shade.
        time_window_s: for the timeline, from and to in seconds after the cell's start; None: a busy stretch
        in the
            middle.
        width: `column` is 3.5 inches, `page` 7; `auto` takes what the panels need.
    """

    figure: FigureName
    workload: str
    layouts: tuple[str, ...] = ()
    concurrency: int | None = Field(default=None, ge=1)
    concurrencies: tuple[int, ...] = ()
    window: Window = Field(default_factory=Window)
    percentiles: tuple[float, ...] = (50.0, 99.0)
    slo_ms: float | None = Field(default=None, gt=0)
    limits: Limits | None = None
    price_per_hour: float | None = Field(default=None, gt=0)
    currency: str | None = None
    margin_percent: float | None = Field(default=None, gt=0)
    time_window_s: tuple[float, float] | None = None
    title: str | None = None
    width: Literal["auto", "column", "page"] = "auto"

    @model_validator(mode="after")
    def _time_runs_on(self) -> FigureSpec:
        if self.time_window_s is not None and self.time_window_s[0] >= self.time_window_s[1]:
            raise ValueError(
                f"time_window_s must run from a smaller to a larger time, not {self.time_window_s}"
            )
        return self

    @model_validator(mode="after")
    def _percentiles_are_percent(self) -> FigureSpec:
        for value in self.percentiles:
            if not 0 < value < 100:
                raise ValueError(f"percentiles are given in percent, between 0 and 100, not {value:g}")
        return self
