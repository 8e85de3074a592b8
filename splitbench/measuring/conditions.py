# SPDX-License-Identifier: Apache-2.0
"""Checks of what was around the requests: the load that really arrived, the client, the machine, the logs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from splitbench.measuring.evidence import Check, Evidence, Series, Verdict
from splitbench.measuring.floor import Floor
from splitbench.measuring.logs import scan_all, summary

# Reasons for which a GPU lowers its clocks, as NVML reports them (nvmlClocksEventReason*).
HARMFUL_THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
POWER_CAP = 0x04
FINDINGS_SHOWN = 3
TICKS_NEEDED = 20
SAMPLES_NEEDED = 3


# -- load ----------------------------------------------------------------------------------------------------
def load(evidence: Evidence) -> Check:
    """As many requests were in flight, or came per second, as the cell asks for, and nobody else's."""
    guests = _guests(evidence)
    if guests is not None:
        return guests
    times = _times(evidence)
    if times is None:
        return Check("load", "warn", "the client states no start times, so the load is not proven")
    starts, ends = times
    if evidence.ramped:
        return Check("load", "ok", "the rate was ramped, so there is no steady one")
    if evidence.request_rate is not None:
        return _open_loop(evidence, starts)
    if evidence.concurrency is None:
        return Check("load", "ok", "all requests were sent at once, as asked")
    return _closed_loop(evidence, evidence.concurrency, starts, ends)


def _guests(evidence: Evidence) -> Check | None:
    """Requests that the engines served during the cell and that are not the client's."""
    served = 0.0
    for engine in evidence.of_role("aggregated", "decode"):
        grown = engine.growth("vllm:request_success_total")
        if grown is None:
            return None
        served += grown
    sent = len(evidence.bench["errors"])
    if served <= sent:
        return None
    figures: dict[str, Any] = {"served": served, "sent": sent}
    reason = f"engines served {served:.0f} requests, the client sent {sent}: somebody else was there"
    return Check("load", "invalid", reason, figures)


def _times(evidence: Evidence) -> tuple[list[float], list[float]] | None:
    """Starts and ends of the requests that succeeded, on the client's clock."""
    bench = evidence.bench
    starts = bench.get("start_times")
    if not starts:
        return None
    latencies = bench.get("latencies")
    good = [index for index in evidence.good if starts[index]]
    if not good:
        return None
    if latencies:
        lengths = [latencies[index] for index in good]
    else:  # older clients: the last token ends a request
        lengths = [bench["ttfts"][index] + sum(bench["itls"][index]) for index in good]
    return [starts[i] for i in good], [starts[i] + (n or 0.0) for i, n in zip(good, lengths, strict=True)]


def in_flight(starts: Sequence[float], ends: Sequence[float], begin: float, end: float) -> float:
    """Mean number of requests in flight between two moments, seconds on one clock."""
    busy = sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in zip(starts, ends, strict=True))
    return busy / (end - begin)


def _closed_loop(evidence: Evidence, cap: int, starts: list[float], ends: list[float]) -> Check:
    limit = evidence.thresholds.load_percent
    ordered = sorted(starts)
    if len(ordered) <= cap:
        return Check(
            "load",
            "warn",
            f"{len(ordered)} requests at a cap of {cap}: never a second round, so nothing is steady",
            {"cap": cap},
        )
    # Steady: from when the cap is reached until there is nothing left to send.
    begin, end = ordered[cap - 1], ordered[-1]
    if end <= begin:
        return Check("load", "warn", "all requests began at once: no steady window", {"cap": cap})
    mean = in_flight(starts, ends, begin, end)
    share = 100 * mean / cap
    figures: dict[str, Any] = {
        "cap": cap,
        "in_flight": round(mean, 3),
        "percent": round(share, 2),
        "window_s": round(end - begin, 3),
    }
    text = f"{mean:.2f} requests in flight of {cap} in the steady window ({end - begin:.1f} s)"
    return Check("load", "invalid" if share < limit else "ok", text, figures, {"percent": limit})


def _open_loop(evidence: Evidence, starts: list[float]) -> Check:
    limit, offered = evidence.thresholds.load_percent, evidence.request_rate or math.inf
    if len(starts) < 2 or max(starts) <= min(starts):
        return Check("load", "warn", "too few requests to know their rate")
    achieved = (len(starts) - 1) / (max(starts) - min(starts))
    share = 100 * achieved / offered
    figures: dict[str, Any] = {
        "offered_per_s": offered,
        "achieved_per_s": round(achieved, 4),
        "percent": round(share, 2),
    }
    text = f"{achieved:.2f} requests/s of {offered:g} offered"
    verdict: Verdict = "ok"
    if share < limit:
        # Gaps are random: with few requests their sum is off by chance alone.
        by_chance = 200 / math.sqrt(len(starts))
        verdict = "warn" if share >= limit - by_chance else "invalid"
    return Check("load", verdict, text, figures, {"percent": limit})


# -- client --------------------------------------------------------------------------------------------------
def client(evidence: Evidence) -> Check:
    """The client had time to spare: it kept off its core's limit and its event loop came on time."""
    thresholds = evidence.thresholds
    cpu = _within(evidence, evidence.sampled("cpu_percent", "client"))
    loop = evidence.client_loop
    if not cpu and loop is None:
        return Check("client", "warn", "the client was not watched")
    itls = sorted(gap * 1e3 for index in evidence.good for gap in evidence.bench["itls"][index])
    limit, share = thresholds.client_cpu_percent, thresholds.client_late_percent
    figures: dict[str, Any] = {"cpu_samples": len(cpu)}
    limits = {"cpu_percent": limit, "late_percent": share}
    said: list[tuple[Verdict, str]] = []
    if cpu:
        mean, peak = statistics.fmean(cpu), max(cpu)
        figures |= {"cpu_percent": round(mean, 1), "cpu_peak_percent": round(peak, 1)}
        # A single sample reaches back to when the client made its prompts.
        if mean > limit and len(cpu) >= SAMPLES_NEEDED:
            said.append(("invalid", f"the client kept a core busy to {mean:.0f} % (limit {limit:g} %)"))
    if loop is not None:
        typical, tail = float(loop["p50_ms"]), float(loop["p99_ms"])
        figures |= {"loop_late_p50_ms": round(typical, 3), "loop_late_p99_ms": round(tail, 3)}
        # A handful of ticks says as much about luck as about the client.
        enough = float(loop["ticks"]) >= TICKS_NEEDED
        if enough and itls and typical > share / 100 * statistics.median(itls):
            said.append(("invalid", f"its event loop is {typical:.1f} ms late in the median"))
        elif enough and itls and tail > share / 100 * _rank(itls, 0.99) and tail > thresholds.client_late_ms:
            said.append(("warn", f"its event loop is {tail:.1f} ms late at P99"))
    if evidence.floor is not None and itls:
        figures |= {
            "floor_streams": evidence.floor.streams,
            "floor_p50_ms": round(evidence.floor.p50_ms, 3),
            "floor_p99_ms": round(evidence.floor.p99_ms, 3),
        }
        said += _near_the_floor(evidence.floor, itls, share)
    if said:
        verdict: Verdict = "invalid" if any(one == "invalid" for one, _ in said) else "warn"
        return Check("client", verdict, "; ".join(text for _, text in said), figures, limits)
    parts = []
    if cpu:
        parts.append(f"{figures['cpu_percent']:g} % of a core")
    if loop is not None:
        parts.append(f"event loop {figures['loop_late_p99_ms']:g} ms late at P99")
    return Check("client", "ok", ", ".join(parts), figures, limits)


def _near_the_floor(floor: Floor, itls: Sequence[float], share: float) -> list[tuple[Verdict, str]]:
    """Like against like: the client's usual error blurs the median, its rare one the tail; `itls` in ms, rising."""
    found: list[tuple[Verdict, str]] = []
    for name, error_ms, itl_ms in (
        ("median", floor.p50_ms, _rank(itls, 0.5)),
        ("P99", floor.p99_ms, _rank(itls, 0.99)),
    ):
        if error_ms > share / 100 * itl_ms:
            text = f"ITLs ({name} {itl_ms:.2f} ms) are near the measurement floor ({error_ms:.2f} ms)"
            found.append(("warn", text))
    return found


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _within(evidence: Evidence, series: Sequence[Series]) -> list[float]:
    """Samples that fall between the first request's start and the last one's end."""
    times = _times(evidence)
    if times is None or evidence.clock_start_s is None:
        return [value for one in series for value in one.values]
    begin, end = min(times[0]) - evidence.clock_start_s, max(times[1]) - evidence.clock_start_s
    return [
        value
        for one in series
        for time_s, value in zip(one.times_s, one.values, strict=True)
        if begin <= time_s <= end
    ]


# -- machine -------------------------------------------------------------------------------------------------
def machine(evidence: Evidence) -> Check:
    """The hardware was ours alone and ran at full speed."""
    thresholds = evidence.thresholds
    if not evidence.series:
        return Check("machine", "warn", "the machine was not watched")
    said: list[tuple[Verdict, str]] = [("invalid", text) for text in evidence.foreign]
    said += _stopped(evidence)
    figures: dict[str, Any] = {}
    limits: dict[str, float] = {}
    steal = _within(evidence, evidence.sampled("steal_percent", "host"))
    stolen = statistics.fmean(steal) if steal else 0.0
    if steal:
        figures["steal_percent"] = round(stolen, 2)
    if evidence.on_gpus:
        limits["steal_percent"] = thresholds.steal_percent
        if stolen > thresholds.steal_percent:
            said.append(("invalid", f"the hypervisor took {stolen:.1f} % of the processors away"))
        said += _gpus(evidence, figures)
    else:
        said += _taken(evidence, stolen, figures, limits)
    if said:
        verdict: Verdict = "invalid" if any(one == "invalid" for one, _ in said) else "warn"
        return Check("machine", verdict, "; ".join(text for _, text in said), figures, limits)
    return Check("machine", "ok", "nobody else there, nothing throttled", figures, limits)


def _taken(
    evidence: Evidence, stolen: float, figures: dict[str, Any], limits: dict[str, float]
) -> list[tuple[Verdict, str]]:
    """Processor time that engines on cores did not get, whoever had it: to them neighbour and hypervisor are alike."""
    thresholds = evidence.thresholds
    limits["taken_warn_percent"] = thresholds.taken_warn_percent
    limits["taken_invalid_percent"] = thresholds.taken_invalid_percent
    others = _within(evidence, evidence.sampled("others_cpu_percent", "host"))
    used = statistics.fmean(others) if others else 0.0
    taken = stolen + used / evidence.processors
    figures |= {"others_cpu_percent": round(used, 1), "processors": evidence.processors}
    figures["taken_percent"] = round(taken, 2)
    if taken <= thresholds.taken_warn_percent:
        return []
    text = (
        f"{taken:.0f} % of {evidence.processors} processors were taken: other processes used {used:.0f} % of a core, "
        f"a hypervisor {stolen:.1f} % of all"
    )
    if taken <= thresholds.taken_invalid_percent:
        return [("warn", text)]
    return [("invalid", f"{text}; close what runs beside it and run with --config on_invalid=rerun")]


def _stopped(evidence: Evidence) -> list[tuple[Verdict, str]]:
    """Who did not run for a while although nothing was wrong with it: SIGSTOP, a debugger, a frozen container."""
    return [
        ("invalid", f"{one.source} was stopped in {count} of the samples")
        for one in evidence.sampled("stopped_processes")
        if (count := len(_within(evidence, [one])))
    ]


def _gpus(evidence: Evidence, figures: dict[str, Any]) -> list[tuple[Verdict, str]]:
    series = evidence.sampled("throttle_reasons", "gpu:")
    if not series:
        return [("warn", "the GPUs were not watched (nvidia-ml-py is not there)")]
    said: list[tuple[Verdict, str]] = []
    capped = total = 0
    for one in series:
        masks = [int(value) for value in _within(evidence, [one])]
        total += len(masks)
        capped += sum(bool(mask & POWER_CAP) for mask in masks)
        for bit, words in HARMFUL_THROTTLES.items():
            if hits := sum(bool(mask & bit) for mask in masks):
                text = f"{one.source} was throttled ({words}) in {hits} of {len(masks)} samples"
                said.append(("invalid", text))
    if total:
        figures["power_capped_percent"] = round(100 * capped / total, 1)
        if 100 * capped / total > evidence.thresholds.power_capped_percent:
            said.append(
                (
                    "warn",
                    f"clocks were held down by the power limit in {100 * capped / total:.0f} % of samples",
                )
            )
    return said


# -- logs and samples ----------------------------------------------------------------------------------------
def server_log(evidence: Evidence) -> Check:
    """The engines' logs, and their count of preemptions, hold nothing that speaks against the cell."""
    preempted = sum(
        engine.growth("vllm:num_preemptions_total") or 0.0 for engine in evidence.engines.values()
    )
    findings = scan_all(evidence.logs, on_gpus=evidence.on_gpus)
    figures: dict[str, Any] = {f"{each.engine}:{each.signature.id}": each.count for each in findings}
    figures["preemptions"] = preempted
    said: list[tuple[Verdict, str]] = []
    if preempted:
        said.append(("invalid", f"{preempted:.0f} requests were preempted and computed again"))
    shown = dict(zip(map(id, findings), summary(findings), strict=True))
    for each in findings:
        judgement = each.signature.judgement
        if judgement == "note":
            continue
        few = each.of is not None and each.count <= evidence.thresholds.unanswered_percent / 100 * each.of
        verdict: Verdict = "warn" if few else judgement
        said.append((verdict, f"{shown[id(each)]}. {each.signature.meaning}"))
    if said:
        said.sort(key=lambda one: one[0] != "invalid")
        rest = f"; and {len(said) - FINDINGS_SHOWN} more" if len(said) > FINDINGS_SHOWN else ""
        text = "; ".join(text for _, text in said[:FINDINGS_SHOWN]) + rest
        return Check("server-log", said[0][0], text, figures)
    if not evidence.logs:
        return Check("server-log", "warn", "no engine's log was kept", figures)
    return Check("server-log", "ok", f"nothing known in the logs of {len(evidence.logs)} engines", figures)


def samples(evidence: Evidence) -> Check | None:
    """Requests are enough for the percentiles that are asked; None where none is asked."""
    if not evidence.percentiles:
        return None
    # scipy takes a second to load, and the workflow reads this module's neighbours when it is parsed.
    from splitbench.statistics.quantiles import sample_gate

    n = len(evidence.good) * evidence.pooled_cells
    gates = {percentile: sample_gate(percentile / 100, n) for percentile in evidence.percentiles}
    lacking = [f"P{p:g} needs {gate.needs:,}" for p, gate in gates.items() if not gate.supported]
    figures: dict[str, Any] = {"requests": len(evidence.good), "cells": evidence.pooled_cells} | {
        f"p{p:g}_needs": gate.needs for p, gate in gates.items()
    }
    if lacking:
        reason = f"{n:,} requests over all repeats; {', '.join(lacking)}: printed as a lower bound only"
        return Check("samples", "warn", reason, figures)
    return Check("samples", "ok", f"{n:,} requests are enough for every percentile asked", figures)
