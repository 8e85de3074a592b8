# SPDX-License-Identifier: Apache-2.0
"""One HTML file per experiment that opens from disk: everything embedded, no script, nothing fetched."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from splitbench.errors import UserError
from splitbench.figures.measured import Layout, Measured, Metric
from splitbench.files import read_json, write_text
from splitbench.report.content import CELL_PERCENTILES, Effect, Growth, Report, cell_rows, effects, ms
from splitbench.report.judged import claim_card, input_line, verdict_card
from splitbench.report.words import FIGURES, Words
from splitbench.wording import METRICS, latency

# An SVG above this is slow in a browser and heavy in a page; its PNG stands in.
_SVG_LIMIT = 500_000


def render(report: Report) -> str:
    """The page as HTML text.

    Raises:
        UserError: a figure's files are missing.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["ms"] = ms
    package = files("splitbench.report")
    template = environment.from_string((package / "page.html.j2").read_text(encoding="utf-8"))
    measured = report.measured
    words = Words(report.language)
    metrics = _metrics(measured)
    verdicts = [row["verdict"] for row in measured.cells.to_dict("records")]
    return template.render(
        report=report,
        css=(package / "page.css").read_text(encoding="utf-8"),
        words=words,
        verdicts=[verdict_card(verdict, words) for verdict in report.verdicts],
        turning=[input_line(line, words) for line in report.break_even_input],
        claims=[claim_card(claim, words) for claim in report.claims],
        sentences=[_sentence(effect, words) for effect in effects(measured, words=words)],
        counts={
            "cells": len(verdicts),
            "invalid": verdicts.count("invalid"),
            "unchecked": sum(not isinstance(verdict, str) for verdict in verdicts),
            "layouts": measured.cells["layout"].nunique(),
            "workloads": len(measured.workloads),
        },
        workloads=[(name, cell_rows(measured, name, metrics)) for name in measured.workloads],
        metrics=[(metric, METRICS[report.language][metric]) for metric in metrics],
        percentiles=[f"P{p:g}" for p in CELL_PERCENTILES],
        mixed="second_token_ms" in metrics,
        checks=sorted({str(name) for name in measured.checks["check"]}),
        outcomes=_outcomes(measured, words),
        figures=[_figure(stem, report, words) for stem in report.figures],
        plans=[_plan(plan) | {"facts": _facts(report.facts.get(plan.layout, {}))} for plan in report.plans],
    )


def write_report(report: Report, path: Path) -> None:
    """Write the page, complete or not at all."""
    write_text(path, render(report))


def _metrics(measured: Measured) -> list[Metric]:
    """ITL and TTFT; the time to second token too, where TTFTs of different content stand in one table."""
    metrics: list[Metric] = ["itl_ms", "ttft_ms"]
    for workload in measured.workloads:
        if len({layout.first_from_prefiller for layout in measured.layouts(workload)}) > 1:
            return [*metrics, "second_token_ms"]
    return metrics


def _sentence(effect: Effect, words: Words) -> dict[str, Any]:
    name = latency(effect.metric, f"p{effect.percentile:g}", words.language)
    return {
        "workload": effect.workload,
        "lead": words(
            "lead", low=effect.low, high=effect.high, budget=words.budget(effect.budget), name=name
        ),
        "arms": [_growth(growth, words) for growth in effect.growths],
        "support": effect.support,
    }


def _growth(growth: Growth, words: Words) -> dict[str, Any]:
    arm = {"name": growth.layout.name, "kind": words(f"kind_{growth.layout.kind}")}
    if growth.low is None or growth.high is None or growth.factor is None:
        why = growth.why_not or words("no_value")
        return {**arm, "text": words("no_comparison", why=why), "factor": ""}
    low, high = growth.low.value_ms, growth.high.value_ms
    ends = {"low_ends": growth.low.brackets, "high_ends": growth.high.brackets}
    text = words(
        "grew" if high > low else "fell" if high < low else "stayed", low=ms(low), high=ms(high), **ends
    )
    return {**arm, "text": text, "factor": f"× {growth.factor:.3g}"}


def _outcomes(measured: Measured, words: Words) -> dict[str, dict[str, tuple[str, str]]]:
    """Per cell and check: outcome and reason."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for row in measured.checks.to_dict("records"):
        reason = words.reason(row["reason"]) if isinstance(row["reason"], str) else ""
        found.setdefault(str(row["cell_id"]), {})[str(row["check"])] = (str(row["outcome"]), reason)
    return found


def _figure(stem: Path, report: Report, words: Words) -> dict[str, Any]:
    sidecar = stem.with_name(f"{stem.name}.json")
    forms = {form: stem.with_name(f"{stem.name}.{form}") for form in ("svg", "png")}
    missing = [path for path in (sidecar, *forms.values()) if not path.is_file()]
    if missing:
        raise UserError("the figure's file is missing", where=str(missing[0]), mend="draw the figure again")
    facts = read_json(sidecar)
    svg = forms["svg"].stat().st_size <= _SVG_LIMIT
    kind, path = ("svg+xml", forms["svg"]) if svg else ("png", forms["png"])
    return {
        "name": stem.name,
        "title": _figure_title(stem.name, report),
        "rerun": report.rerun_figure.format(figure=stem.name) if report.rerun_figure else "",
        "caption": words.caption(facts["caption"]),
        "wide": _is_wide(forms["png"]),
        "source": f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}",
        "cells": facts.get("cells", {}),
        "invalid": facts.get("invalid_cells", []),
        "data_sha256": facts.get("data_sha256", ""),
        "code_version": facts.get("code_version", ""),
    }


def _figure_title(name: str, report: Report) -> str:
    """A title in the page's language where the picture's own is in another one."""
    figure, _, workload = name.partition("-")
    if report.language == "en" or figure not in FIGURES:
        return ""
    return f"{FIGURES[figure]}、{workload}" if workload else FIGURES[figure]


def _is_wide(png: Path) -> bool:
    """Whether a figure is a page wide: the size is in the PNG's first chunk."""
    head = png.read_bytes()[16:24]
    width = int.from_bytes(head[:4], "big")
    return width > 1500


def _facts(facts: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Engines as columns, facts as rows; empty where no engine said anything."""
    engines = list(dict.fromkeys(engine for values in facts.values() for engine in values))
    rows = [(fact, [values.get(engine, "–") for engine in engines]) for fact, values in sorted(facts.items())]
    return {"engines": engines, "rows": rows}


def _plan(plan: Any) -> dict[str, Any]:
    layout = Layout(plan.layout, plan.kind, str(plan.budget), plan.first_token)
    return {
        "words": layout.words,
        "connector": plan.connector or "",
        "first_token": plan.first_token or "",
        "digest": plan.digest,
        "processes": [
            {
                "name": f"{engine.name} ({engine.role}, {'devices' if len(engine.devices) > 1 else 'device'} "
                f"{', '.join(map(str, engine.devices))})",
                "command": shlex.join(engine.argv),
                "env": engine.env,
            }
            for engine in plan.engines
        ]
        + (
            [{"name": "proxy", "command": shlex.join(plan.proxy.argv), "env": plan.proxy.env}]
            if plan.proxy
            else []
        ),
    }
