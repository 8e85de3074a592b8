# SPDX-License-Identifier: Apache-2.0
"""Sentences of verdicts and claims in English and Japanese, made from the codes and facts of the statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

Language = Literal["en", "ja"]

METRICS: Mapping[Language, Mapping[str, str]] = {
    "en": {
        "itl_ms": "ITL",
        "ttft_ms": "TTFT",
        "second_token_ms": "time to second token",
        "e2e_ms": "end-to-end latency",
    },
    "ja": {
        "itl_ms": "ITL",
        "ttft_ms": "TTFT",
        "second_token_ms": "2 トークン目までの時間",
        "e2e_ms": "全体の応答時間",
    },
}

REASONS: Mapping[Language, Mapping[str, str]] = {
    "en": {
        "no_shared_load": "the two layouts share no load with valid cells",
        "no_latencies": "no latencies of single requests were recorded at c={load:g}",
        "few_repeats": "a layout has only {runs} of the {runs_needed} valid runs and {restarts} of the "
        "{restarts_needed} server starts that a verdict asks for",
        "few_requests": "{name} needs {needs:,} requests and there are {n:,}",
        "other_nodes": "the layouts ran on different nodes ({reference} on {theirs}, {layout} on {ours}), and the "
        "layout's effect can't be told from the machine's",
        "better": "the {name} is {change}{interval} than that of {reference} at c={load:g}, "
        "beyond the margin of {margin:g} %",
        "worse": "the {name} is {change}{interval} than that of {reference} at c={load:g}, "
        "beyond the margin of {margin:g} %",
        "keeps_slo": "at c={load:g} only {keeper} surely keeps the SLO",
        "mixed": "the {name} is better but the {other} worse at c={load:g}, and the SLO does not tell which counts",
        "unclear": "the {name} is {change}{interval} than that of {reference} at c={load:g}: "
        "the interval leaves open whether the difference exceeds {margin:g} %",
        "reads": "the samples read {change} for PD's {name} than for {reference}'s at c={load:g}",
        "no_difference": "no latency differs by more than the margin of {margin:g} % at c={load:g}",
    },
    "ja": {
        "no_shared_load": "両構成に共通する有効な負荷がない",
        "no_latencies": "c={load:g} でリクエストごとの遅延が記録されていない",
        "few_repeats": "有効な測定が {runs} 回 (必要 {runs_needed} 回)、サーバー起動が {restarts} 回 "
        "(必要 {restarts_needed} 回) しかない",
        "few_requests": "{name} には {needs:,} リクエストが必要だが {n:,} しかない",
        "other_nodes": "{reference} は {theirs}、{layout} は {ours} で測定され、構成の差とマシンの差を区別できない",
        "better": "c={load:g} で {name} が {reference} より{change}{interval}、許容差 {margin:g} % を超える",
        "worse": "c={load:g} で {name} が {reference} より{change}{interval}、許容差 {margin:g} % を超える",
        "keeps_slo": "c={load:g} で SLO を確実に守るのは {keeper} だけである",
        "mixed": "c={load:g} で {name} は良くなるが {other} は悪くなり、SLO ではどちらを重視するか決まらない",
        "unclear": "c={load:g} で {name} が {reference} より{change}{interval}、"
        "区間からは差が {margin:g} % を超えるか決められない",
        "reads": "標本の値では c={load:g} で PD の {name} が {reference} より{change}なっている",
        "no_difference": "c={load:g} でどの遅延にも許容差 {margin:g} % を超える差がない",
    },
}

NEXT: Mapping[Language, Mapping[str, str]] = {
    "en": {
        "measure_valid": "Measure the invalid cells again ({cells}), after mending what their checks name.",
        "same_nodes": "Measure both layouts on the same nodes.",
        "more_restarts": "Set matrix.restarts to {restarts} or more.",
        "more_requests": "Send at least {needs:,} requests at c={load:g} (workloads: prompts), or set more restarts.",
        "more_units": "Add repeats or restarts: {units} independent units of level '{level}' leave it open.",
        "set_slo": "Set limits in slo, so that it is known which latency counts.",
        "tighter_slo": "Set the limit in slo that your users feel; both layouts are on the same side of this one.",
        "between_loads": "Measure between c={load:g} and c={above:g}, where both layouts lose the SLO.",
        "higher_load": "Measure above c={load:g}: nothing parts the layouts up to there.",
    },
    "ja": {
        "measure_valid": "無効なセル ({cells} 件) を、チェックの指摘を直してから測り直す。",
        "same_nodes": "両構成を同じノードで測る。",
        "more_restarts": "matrix.restarts を {restarts} 以上にする。",
        "more_requests": "c={load:g} で {needs:,} リクエスト以上を送る (workloads の prompts)、または "
        "restarts を増やす。",
        "more_units": "測定または再起動を増やす: 独立な単位 ({level}) {units} 個では決まらない。",
        "set_slo": "どの遅延を重視するか分かるように slo に上限を設定する。",
        "tighter_slo": "利用者が実際に感じる上限を slo に設定する。今の上限では両構成が同じ側にある。",
        "between_loads": "両構成が SLO を守れなくなる c={load:g} と c={above:g} の間を測る。",
        "higher_load": "c={load:g} より高い負荷を測る。そこまででは差がつかない。",
    },
}

CLAIM_REASONS: Mapping[Language, Mapping[str, str]] = {
    "en": {
        "not_measured": "not measured",
        "no_valid_cell": "no valid cell",
        "few_requests": "n={n:,}, needs {needs:,}",
        "one_unit": "one independent unit, so no interval",
        "interval": "the interval holds both",
        "other_nodes": "measured on different nodes",
    },
    "ja": {
        "not_measured": "未測定",
        "no_valid_cell": "有効なセルがない",
        "few_requests": "n={n:,}、{needs:,} 必要",
        "one_unit": "独立な単位が 1 つで区間なし",
        "interval": "区間が両方を含む",
        "other_nodes": "別のノードで測定された",
    },
}

OUTCOMES: Mapping[Language, Mapping[str, str]] = {
    "en": {
        "wins": "PD wins",
        "loses": "PD loses",
        "undecided": "Undecided",
        "reproduced": "reproduced",
        "contradicted": "contradicted",
        "not decidable": "not decidable",
    },
    "ja": {
        "wins": "PD が有利",
        "loses": "PD が不利",
        "undecided": "判定できない",
        "reproduced": "再現した",
        "contradicted": "反証された",
        "not decidable": "決められない",
    },
}


def percent(share: float | None) -> str:
    """A relative change, signed: +12 %, -0.4 %; factors from five up as × 7.1."""
    if share is None or not math.isfinite(share):
        return "?"
    if share >= 4:
        return f"× {1 + share:.3g}"
    value = 100 * share
    return f"{value:+.0f} %" if abs(value) >= 10 else f"{value:+.1f} %"


def bracket(low: float | None, high: float | None, language: Language) -> str:
    """`[-20 % to -5 %]`; nothing where an end is missing."""
    between = {"en": "to", "ja": "〜"}[language]
    return "" if low is None or high is None else f" [{percent(low)} {between} {percent(high)}]"


def latency(metric: str, statistic: str, language: Language) -> str:
    """`P99 ITL`, `mean TTFT`."""
    name = METRICS[language][metric]
    if statistic == "mean":
        return f"mean {name}" if language == "en" else f"平均 {name}"
    return f"{statistic.upper()} {name}"


def _change(share: float | None, language: Language) -> str:
    if share is None:
        return "?"
    size = percent(abs(share)).lstrip("+")
    if language == "en":
        return f"{size} {'lower' if share < 0 else 'higher'}"
    return f" {size} {'低く' if share < 0 else '高く'}"


def _filled(reason: Mapping[str, Any], verdict: Mapping[str, Any], language: Language) -> str:
    facts: dict[str, Any] = {"reference": verdict["reference"], **reason, "margin": verdict["margin_percent"]}
    if "statistic" in reason:
        facts["name"] = latency(reason["metric"], reason["statistic"], language)
    if "change" in reason:
        facts["change"] = _change(reason["change"], language)
        facts["interval"] = bracket(reason["low"], reason["high"], language) if reason["supported"] else ""
    if "worse" in reason:
        facts["other"] = latency(reason["worse"]["metric"], reason["worse"]["statistic"], language)
    return REASONS[language][reason["code"]].format(**facts)


def explain(verdict: Mapping[str, Any], language: Language) -> str:
    """One sentence why the verdict is as it is."""
    reasons = [_filled(reason, verdict, language) for reason in verdict["reasons"]]
    joined = "; ".join(reasons) if language == "en" else "。".join(reasons)
    return f"{joined[:1].upper()}{joined[1:]}." if language == "en" else f"{joined}。"


def advise(verdict: Mapping[str, Any], language: Language) -> str:
    """What to measure next; empty where nothing is asked for."""
    step = verdict["next"]
    return "" if step is None else NEXT[language][step["code"]].format(**step)
