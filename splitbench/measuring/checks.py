# SPDX-License-Identifier: Apache-2.0
"""When a number counts: each check is a pure function from a cell's evidence to a verdict with its reasons.

Thresholds and their defaults are in `splitbench.experiment.models.Thresholds`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from splitbench.experiment.models import Thresholds
from splitbench.measuring.metrics import Metrics, growth

Verdict = Literal["ok", "warn", "invalid"]
_RANK: dict[Verdict, int] = {"ok": 0, "warn": 1, "invalid": 2}


@dataclass(frozen=True)
class Check:
    """One verdict on one cell."""

    name: str
    verdict: Verdict
    reason: str
    figures: dict[str, float | int | str | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class EngineEvidence:
    """An engine's own counters around the measured requests."""

    role: str
    before: Metrics
    after: Metrics

    def growth(self, name: str, **labels: str) -> float | None:
        """How much a counter grew during the cell."""
        return growth(self.before, self.after, name, **labels)


@dataclass(frozen=True)
class Evidence:
    """Everything a check may look at.

    `bench` is the client's detailed result; its lists run over requests in the order of submission.
    """

    kind: str
    prompts: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    warmups: int
    warmup_seed_differs: bool
    bench: Mapping[str, Any]
    engines: Mapping[str, EngineEvidence]
    thresholds: Thresholds = field(default_factory=Thresholds)

    @property
    def good(self) -> list[int]:
        """Indices of the requests that succeeded."""
        return [index for index, error in enumerate(self.bench["errors"]) if not error]

    def of_role(self, *roles: str) -> list[EngineEvidence]:
        """Engines that have one of these roles."""
        return [engine for engine in self.engines.values() if engine.role in roles]


def completion(evidence: Evidence) -> Check:
    """Every request asked for was sent and succeeded."""
    errors: Sequence[str] = evidence.bench["errors"]
    failed = [error for error in errors if error]
    figures: dict[str, Any] = {
        "asked": evidence.prompts,
        "sent": len(errors),
        "completed": len(errors) - len(failed),
        "failed": len(failed),
    }
    if failed:
        first = failed[0].strip().splitlines()[-1][:160]
        return Check(
            "completion", "invalid", f"{len(failed)} of {len(errors)} requests failed: {first}", figures
        )
    if len(errors) < evidence.prompts:
        return Check(
            "completion", "invalid", f"{len(errors)} of {evidence.prompts} requests were sent", figures
        )
    return Check("completion", "ok", f"all {len(errors)} requests completed", figures)


def tokens(evidence: Evidence) -> Check:
    """Requests had the lengths that were asked for."""
    inputs = [evidence.bench["input_lens"][index] for index in evidence.good]
    outputs = [evidence.bench["output_lens"][index] for index in evidence.good]
    if not inputs:
        return Check("tokens", "invalid", "no request succeeded, so no length is known")
    wrong = sum(length != evidence.output_tokens for length in outputs)
    off = max(abs(length - evidence.input_tokens) / evidence.input_tokens * 100 for length in inputs)
    figures: dict[str, Any] = {
        "output_tokens": sum(outputs),
        "output_tokens_asked": evidence.output_tokens * len(outputs),
        "requests_with_wrong_output": wrong,
        "input_off_percent": round(off, 4),
    }
    if wrong:
        return Check(
            "tokens",
            "invalid",
            f"{wrong} of {len(outputs)} requests made another number of tokens than {evidence.output_tokens}",
            figures,
        )
    limit = evidence.thresholds.input_tokens_off_percent
    if off > limit:
        return Check("tokens", "invalid", f"inputs are off by up to {off:.2f} % (limit {limit:g} %)", figures)
    if off > 0:
        return Check("tokens", "warn", f"inputs are off by up to {off:.2f} %", figures)
    return Check("tokens", "ok", "all lengths as asked", figures)


def coalescing(evidence: Evidence) -> Check:
    """Gaps are between single tokens and the client saw them apart."""
    thresholds = evidence.thresholds
    good = evidence.good
    itls = [gap * 1e3 for index in good for gap in evidence.bench["itls"][index]]
    if not good:
        return Check("coalescing", "invalid", "no request succeeded, so no gap is known")
    ragged = sum(len(evidence.bench["itls"][i]) + 1 != evidence.bench["output_lens"][i] for i in good)
    below_ms = min(thresholds.coalesced_below_ms, statistics.median(itls) / 10) if itls else 0.0
    tiny = sum(gap < below_ms for gap in itls)
    ragged_percent = 100 * ragged / len(good)
    tiny_percent = 100 * tiny / len(itls) if itls else 0.0
    figures: dict[str, Any] = {
        "requests_with_merged_tokens_percent": round(ragged_percent, 3),
        "itls_near_zero_percent": round(tiny_percent, 3),
        "near_zero_below_ms": round(below_ms, 4),
    }
    if ragged_percent >= tiny_percent:
        worst, text = ragged_percent, f"{ragged_percent:.1f} % of requests have chunks with several tokens"
    else:
        worst, text = tiny_percent, f"{tiny_percent:.1f} % of ITLs are below {below_ms:.3f} ms"
    if worst > thresholds.coalesced_invalid_percent:
        return Check("coalescing", "invalid", text, figures)
    if worst > thresholds.coalesced_warn_percent:
        return Check("coalescing", "warn", text, figures)
    return Check("coalescing", "ok", text, figures)


def warm_up(evidence: Evidence) -> Check:
    """At least as many warm-up requests as are in flight, none of them measured."""
    figures: dict[str, Any] = {"warmups": evidence.warmups, "concurrency": evidence.concurrency}
    if evidence.warmups < evidence.concurrency:
        return Check(
            "warm-up",
            "invalid",
            f"{evidence.warmups} warm-up requests for {evidence.concurrency} in flight",
            figures,
        )
    if not evidence.warmup_seed_differs:
        return Check("warm-up", "invalid", "warm-up prompts are among the measured ones", figures)
    return Check("warm-up", "ok", f"{evidence.warmups} requests that are not measured", figures)


def fresh_prompts(evidence: Evidence) -> Check:
    """Prompts were computed (or moved), not found in the prefix cache."""
    limit = evidence.thresholds.prefix_hit_percent
    queries = hits = 0.0
    for engine in evidence.of_role("aggregated", "prefill"):
        asked = engine.growth("vllm:prefix_cache_queries_total")
        found = engine.growth("vllm:prefix_cache_hits_total")
        if asked is None or found is None:
            return Check(
                "fresh-prompts",
                "warn",
                "an engine does not count prefix-cache hits, so freshness is not proven",
            )
        queries += asked
        hits += found
    share = 100 * hits / queries if queries else 0.0
    figures: dict[str, Any] = {"queried_tokens": queries, "hit_tokens": hits, "hit_percent": round(share, 4)}
    if share > limit:
        return Check(
            "fresh-prompts", "invalid", f"{share:.1f} % of prompt tokens came from the prefix cache", figures
        )
    return Check("fresh-prompts", "ok", f"{share:.2f} % of prompt tokens came from the prefix cache", figures)


def kv_moved(evidence: Evidence) -> Check | None:
    """The decoders loaded the prompts' KV instead of computing it again; None where nothing is to be moved."""
    decoders = evidence.of_role("decode")
    if not decoders:
        return None
    name = "vllm:prompt_tokens_by_source_total"
    moved = computed = 0.0
    for engine in decoders:
        loads = engine.growth(name, source="external_kv_transfer")
        local = engine.growth(name, source="local_compute")
        if loads is None or local is None:
            return Check(
                "kv-moved",
                "invalid",
                "a decoder does not count loaded tokens, so nothing proves that KV moved",
            )
        moved += loads
        computed += local
    # The last prompt token is always computed by the decoder itself where the connector leaves it out.
    prompt = sum(evidence.bench["input_lens"][index] for index in evidence.good)
    needed = max(prompt - len(evidence.good), 1)
    share = 100 * moved / needed
    moved_bytes = sum(engine.growth("vllm:nixl_bytes_transferred_sum") or 0.0 for engine in decoders)
    figures: dict[str, Any] = {
        "prompt_tokens": prompt,
        "loaded_tokens": moved,
        "computed_tokens": computed,
        "loaded_percent": round(share, 3),
        "moved_bytes": moved_bytes,
    }
    if share < evidence.thresholds.kv_moved_percent:
        return Check(
            "kv-moved", "invalid", f"decoders loaded only {share:.1f} % of the prompt tokens", figures
        )
    return Check(
        "kv-moved",
        "ok",
        f"decoders loaded {moved:.0f} of {prompt} prompt tokens, computed {computed:.0f}",
        figures,
    )


def all_checks(evidence: Evidence) -> list[Check]:
    """Every check that applies to a cell, in a fixed order."""
    checks = [
        completion(evidence),
        tokens(evidence),
        coalescing(evidence),
        warm_up(evidence),
        fresh_prompts(evidence),
        kv_moved(evidence),
    ]
    return [check for check in checks if check is not None]


def worst(checks: Sequence[Check]) -> Verdict:
    """The cell's verdict: its worst check."""
    return max((check.verdict for check in checks), key=_RANK.__getitem__, default="ok")
