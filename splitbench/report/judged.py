# SPDX-License-Identifier: Apache-2.0
"""Verdicts and claims as the page shows them: texts and table rows from the statistics' JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitbench.report.content import ms
from splitbench.report.words import Words
from splitbench.serving.plan import Budget
from splitbench.wording import CLAIM_REASONS, OUTCOMES, Language, advise, bracket, explain, latency, percent

_CLASSES = {
    "wins": "good",
    "reproduced": "good",
    "loses": "bad",
    "contradicted": "bad",
    "undecided": "open",
    "not decidable": "open",
}


def verdict_card(verdict: Mapping[str, Any], words: Words) -> dict[str, Any]:
    """One verdict: outcome, the deciding differences, why, what next, break-even and what was left out."""
    language = words.language
    budget = str(Budget(kind=verdict["budget"]["kind"], count=verdict["budget"]["count"]))
    deciding = [one for one in verdict["differences"] if one["deciding"]]
    return {
        "title": words("within", workload=verdict["workload"], budget=words.budget(budget)),
        "names": (verdict["reference"], verdict["layout"]),
        "pair": words("against", layout=verdict["layout"], reference=verdict["reference"]),
        "load": "" if verdict["load"] is None else words("at_load", load=f"{verdict['load']:g}"),
        "outcome": OUTCOMES[language][verdict["outcome"]],
        "class": _CLASSES[verdict["outcome"]],
        "why": explain(verdict, language),
        "next": advise(verdict, language),
        "deciding": [_difference(one, words) for one in deciding],
        "all": [_difference(one, words) for one in verdict["differences"]],
        "keeps": [
            (name, words("none") if load is None else words("upto", load=f"{load:g}"))
            for name, load in verdict["highest_load"].items()
        ]
        if any(kept is not None for kept in verdict["keeps_slo"].values())
        else [],
        "break_even": [
            _break_even(line, verdict, words) for line in verdict["break_even"] if line["places"] > 1
        ],
        "asymmetries": [entry["reason"] for entry in verdict["asymmetries"]],
        "invalid": verdict["invalid_cells"],
    }


def _difference(one: Mapping[str, Any], words: Words) -> dict[str, Any]:
    supported = one["supported"]
    return {
        "load": f"c={one['load']:g}",
        "name": latency(one["metric"], one["statistic"], words.language),
        "reference": _ms(one["reference_ms"]),
        "layout": _ms(one["layout_ms"]),
        "change": percent(one["change"]),
        "interval": bracket(one["low"], one["high"], words.language).strip() if supported else "–",
        "n": f"{one['n']:,}" if supported else f"{one['n']:,} < {one['needs']:,}",
        "finding": words(f"findings_{one['finding']}"),
        "deciding": one["deciding"],
    }


def _break_even(line: Mapping[str, Any], verdict: Mapping[str, Any], words: Words) -> str:
    facts = {
        "name": latency(line["metric"], f"p{verdict['percentile']:g}", words.language),
        "lower": verdict["layout"] if line["better_below"] == "layout" else verdict["reference"],
        "reading": "" if line["supported"] else words("reading"),
    }
    if line["at"] is None:
        return words("break_even_none", **facts)
    return words("break_even_at", at=f"{line['at']:.3g}", ends=_ends(line), **facts)


def input_line(line: Mapping[str, Any], words: Words) -> str:
    """Break-even along the input length in one sentence."""
    facts = {
        "name": latency(line["metric"], line["statistic"], words.language),
        "layout": line["layout"],
        "reference": line["reference"],
        "load": f"{line['load']:g}",
        "lower": line["layout"] if line["better_below"] == "layout" else line["reference"],
        "reading": "" if line["supported"] else words("reading"),
    }
    if line["at"] is None:
        return words("input_none", **facts)
    return words("input_at", at=f"{line['at']:,.0f}", ends=_ends(line), **facts)


def _ends(line: Mapping[str, Any]) -> str:
    """Interval of a place; nothing where an end lies outside what was measured."""
    if line["low"] is None or line["high"] is None or not line["supported"]:
        return ""
    return f" [{line['low']:,.3g}–{line['high']:,.3g}]"


def claim_card(claim: Mapping[str, Any], words: Words) -> dict[str, Any]:
    """One claim: its sentence, outcome, and every comparison behind it."""
    language = words.language
    undecided = claim["outcome"] == "not decidable"
    return {
        "name": claim["claim"],
        "says": (claim["says_ja"] if language == "ja" else "") or claim["says"],
        "outcome": OUTCOMES[language][claim["outcome"]],
        "class": _CLASSES[claim["outcome"]],
        "reads": words(f"reads_{claim['reads']}") if undecided else "",
        "mixed": any(test["mixed_content"] for test in claim["tests"]),
        "other_budget": list(
            dict.fromkeys(
                words(
                    "other_budget",
                    arms="; ".join(f"{name} {words.budget(b)}" for name, b in test["budgets"].items()),
                )
                for test in claim["tests"]
                if test["budgets"]
            )
        ),
        "rows": [_evidence(test, figure, words) for test in claim["tests"] for figure in test["figures"]],
    }


def _evidence(test: Mapping[str, Any], figure: Mapping[str, Any], words: Words) -> dict[str, Any]:
    language = words.language
    reason = figure.get("reason")
    return {
        "test": _asked(test, figure, words),
        "value": _found(figure, language),
        "n": f"{figure['n']:,}" if figure.get("n") is not None else "–",
        "outcome": OUTCOMES[language][figure["outcome"]],
        "class": _CLASSES[figure["outcome"]],
        "reason": "" if reason is None else CLAIM_REASONS[language][reason["code"]].format(**reason),
    }


_SIGNS = {
    "at_most": "≤ {threshold:g} ms",
    "above": "> {threshold:g} ms",
    "grows": "↗",
    "lower": "< {reference}",
    "higher": "> {reference}",
    "not_lower": "≮ {reference}",
    "not_higher": "≯ {reference}",
    "serves_no_more": "max c (≤ {threshold:g} ms) ≤ {reference}",
    "crosses": "× {reference}, P{between[0]:g}–P{between[1]:g}",
    "stairs": "≥ {threshold:g} steps",
    "smaller_gain": "gain < {other_workload} ({reference})",
}


def _asked(test: Mapping[str, Any], figure: Mapping[str, Any], words: Words) -> str:
    statistic = figure.get("statistic")
    name = latency(test["metric"], statistic or "", words.language).strip()
    sign = _SIGNS[test["relation"]].format(**test)
    if test.get("by_percent"):
        sign += f" − {test['by_percent']:g} %"
    place = f", c={figure['load']:g}" if figure.get("load") and test["relation"] != "serves_no_more" else ""
    if test["relation"] == "grows" and figure.get("loads"):
        place = f", c={figure['loads'][0]:g}…{figure['loads'][-1]:g}"
    return f"{test['workload']}{place}: {name} {test['layout']} {sign}"


def _found(figure: Mapping[str, Any], language: Language) -> str:
    if "values_ms" in figure:
        return " → ".join(_ms(value) for value in figure["values_ms"]) + " ms"
    if "other_change" in figure:
        here = percent(figure["change"]) + bracket(figure["low"], figure["high"], language)
        ends = bracket(figure["other_low"], figure["other_high"], language)
        return f"{here} / {percent(figure['other_change'])}{ends}"
    if "change" in figure:
        ends = bracket(figure["low"], figure["high"], language) if figure["supported"] else ""
        return f"{_ms(figure['layout_ms'])} / {_ms(figure['reference_ms'])} ms: {percent(figure['change'])}{ends}"
    if "value_ms" in figure:
        low, high = ("?" if figure[key] is None else _ms(figure[key]) for key in ("low_ms", "high_ms"))
        return f"{_ms(figure['value_ms'])} ms [{low}–{high}]"
    if "steps" in figure:
        return f"{figure['steps']} [{figure['low_steps']}–{figure['high_steps']}]"
    if "reference_load" in figure:
        return f"c={figure['load']:g} / c={figure['reference_load']:g}"
    if figure.get("percentile") is not None:
        bounds = figure["low_percentile"] or 0, figure["high_percentile"] or 100
        return f"P{figure['percentile']:.4g} [P{bounds[0]:.4g}–P{bounds[1]:.4g}]"
    return "–"


def _ms(value: float | None) -> str:
    return "?" if value is None else ms(value)
