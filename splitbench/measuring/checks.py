# SPDX-License-Identifier: Apache-2.0
"""When a number counts: each check is a pure function from a cell's evidence to a verdict with its reasons.

The checks of the requests themselves are here, those of what was around them in `conditions`, those of the KV
transfer in `transfer`. Thresholds and their defaults are in `splitbench.experiment.models.Thresholds`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from splitbench.measuring import conditions, transfer
from splitbench.measuring.evidence import Check, EngineEvidence, Evidence, Verdict, worst
from splitbench.measuring.transfer import kv_moved

__all__ = ["Check", "EngineEvidence", "Evidence", "Verdict", "all_checks", "kv_moved", "worst"]


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
    if not evidence.exact_lengths:
        return _own_lengths(inputs, outputs)
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


def _own_lengths(inputs: list[int], outputs: list[int]) -> Check:
    """Lengths of a workload whose requests differ: nothing is asked of each, but none may be empty."""
    figures: dict[str, Any] = {"input_tokens": sum(inputs), "output_tokens": sum(outputs)}
    empty = sum(length < 1 for length in (*inputs, *outputs))
    if empty:
        return Check("tokens", "invalid", f"{empty} prompts or answers are empty", figures)
    text = f"inputs of {min(inputs)} to {max(inputs)} tokens, outputs of {min(outputs)} to {max(outputs)}"
    return Check("tokens", "ok", text, figures)


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
    # Without a cap nobody knows beforehand how many will be in flight; one request is the least.
    needed = evidence.concurrency or 1
    if evidence.warmups < needed:
        return Check(
            "warm-up", "invalid", f"{evidence.warmups} warm-up requests for {needed} in flight", figures
        )
    if not evidence.warmup_seed_differs:
        return Check("warm-up", "invalid", "warm-up prompts are among the measured ones", figures)
    return Check("warm-up", "ok", f"{evidence.warmups} requests that are not measured", figures)


def fresh_prompts(evidence: Evidence) -> Check:
    """Prompts were computed (or moved), not found in the prefix cache."""
    limit = evidence.thresholds.prefix_hit_percent + evidence.shared_percent
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


def all_checks(evidence: Evidence) -> list[Check]:
    """Every check that applies to a cell, in a fixed order."""
    checks = [
        completion(evidence),
        tokens(evidence),
        coalescing(evidence),
        warm_up(evidence),
        fresh_prompts(evidence),
        transfer.kv_moved(evidence),
        transfer.same_answers(evidence),
        transfer.transport(evidence),
        conditions.load(evidence),
        conditions.client(evidence),
        conditions.machine(evidence),
        conditions.server_log(evidence),
        conditions.samples(evidence),
    ]
    return [check for check in checks if check is not None]
