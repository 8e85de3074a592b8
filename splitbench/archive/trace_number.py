# SPDX-License-Identifier: Apache-2.0
"""From the id of a number on the report's page to the cells, files and lines of the config that it rests on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from splitbench.archive.place import Place
from splitbench.archive.trace import Trace, chain, trace
from splitbench.errors import UserError
from splitbench.report.numbers import ID, Stated, numbers_of

# Keys of the config that a kind of number depends on beside those of its cells.
_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "verdict": ("slo", "margin_percent"),
    "slo": ("slo",),
    "check": ("thresholds",),
    "input": ("margin_percent",),
}
# Where the page took it from, by kind.
_MADE_FROM = {
    "verdict": "statistics.json",
    "claim": "statistics.json",
    "slo": "statistics.json",
    "input": "statistics.json",
    "counts": "tables/cells.parquet",
    "check": "tables/checks.parquet",
}


def is_number(name: str) -> bool:
    """Whether this is the id of a number, and not a file."""
    return ID.fullmatch(name) is not None


def trace_number(place: Place, name: str) -> Trace:
    """Trace one number.

    Args:
        place: where the results are; its report is what knows the id.
        name: the id, as in `n-0123456789`.

    Raises:
        UserError: no report here, or none that has this id.
    """
    page, base = _page(place)
    stated = numbers_of(page)
    if name not in stated:
        raise UserError(
            f"no number {name!r} on the page of {place.name}"
            + ("" if stated else ", which a version wrote that gave no ids"),
            mend="take the id from where the pointer rests, or from data-number in report.html",
        )
    found = stated[name]
    kind, *rest = found.of
    if kind == "figure":
        whole = trace(place, f"{base}/figures/{rest[0]}.png")
        whole.facts |= {"number": name, "about": list(found.of)}
        return whole
    return _chain(place, base, name, found)


def _page(place: Place) -> tuple[str, str]:
    for name in place.names:
        if name.removesuffix(".gz").endswith("/report.html") and name.startswith("results/"):
            data = place.read(name.removesuffix(".gz")) or b""
            return data.decode("utf-8"), name.rpartition("/")[0]
    raise UserError("holds no report", where=place.name, mend="run the workflow to its end")


def _chain(place: Place, base: str, name: str, found: Stated) -> Trace:
    kind, *rest = found.of
    slices = {cell: place.json(f"{base}/cells/{cell}/cell.json") or {} for cell in _cell_ids(place, base)}
    wanted = _cells(place, base, kind, rest, slices)
    left_out = [] if kind in ("cell", "check", "counts", "plan", "fact") else _invalid(place, base, wanted)
    sections: list[tuple[str, ...]] = []
    sections += [(section,) for section in _SECTIONS.get(kind, ())]
    if kind == "claim":
        sections.append(("claims", str(rest[0])))
    elif kind == "config":
        sections.append((str(rest[0]),))
        sections += [("margin_percent",)] if rest[0] == "slo" else []
    facts: dict[str, Any] = {"number": name, "about": list(found.of), "says": found.text}
    if kind in _MADE_FROM:
        facts["made_from"] = place.stored(f"{base}/{_MADE_FROM[kind]}")
    if left_out:
        facts["left_out"] = left_out
    if len(left_out) < len(wanted):  # else it says that there is nothing valid, and rests on just these
        wanted = [cell for cell in wanted if cell not in left_out]
    return chain(
        place,
        base,
        f"{base}/report.html",
        "number of the report",
        wanted,
        sections,
        facts,
    )


def _cell_ids(place: Place, base: str) -> list[str]:
    ends = ("/cell.json", "/cell.json.gz")
    start = f"{base}/cells/"
    return sorted(
        name.removeprefix(start).rpartition("/")[0]
        for name in place.names
        if name.startswith(start) and name.endswith(ends)
    )


def _cells(
    place: Place, base: str, kind: str, rest: list[Any], slices: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """The cells that a number rests on."""

    def those(
        layouts: Iterable[Any], workloads: Collection[Any] = (), loads: Collection[Any] = ()
    ) -> list[str]:
        names = set(layouts)
        return [
            cell
            for cell, slice_ in slices.items()
            if slice_.get("layout", {}).get("name") in names
            and (not workloads or slice_.get("workload", {}).get("name") in workloads)
            and (not loads or slice_.get("concurrency") in loads)
        ]

    every = {slice_.get("layout", {}).get("name") for slice_ in slices.values()}
    if kind in ("cell", "check"):
        return [str(rest[0])]
    if kind == "verdict":  # workload, budget, layout, reference, and for one difference its load
        return those(rest[2:4], rest[:1], rest[4:5])
    if kind == "effect":  # workload, budget, metric, percentile, and for one arm its layout
        return those(rest[4:5] or every, rest[:1])
    if kind == "slo":
        return those(rest[:1], rest[1:2])
    if kind == "input":
        return those(rest[:2], (), rest[2:3])
    if kind in ("plan", "fact"):
        return those(rest[:1])
    if kind == "claim":
        return _claim(place, base, rest, those)
    return [] if kind in ("config", "command") else list(slices)


def _claim(place: Place, base: str, rest: list[Any], those: Any) -> list[str]:
    """Cells of a claim's tests, or of one of its figures: `rest` is the claim, and then a test and a figure of it."""
    statistics = place.json(f"{base}/statistics.json") or {}
    claim = next((one for one in statistics.get("claims", ()) if one["claim"] == rest[0]), None)
    if claim is None:
        return []
    found: dict[str, None] = {}
    for at, test in enumerate(claim["tests"]):
        if len(rest) > 1 and at != rest[1]:
            continue
        layouts = [test[key] for key in ("layout", "reference") if test.get(key)]
        workloads = [test[key] for key in ("workload", "other_workload") if test.get(key)]
        figures = test["figures"][rest[2] : rest[2] + 1] if len(rest) > 2 else test["figures"]
        for figure in figures:
            loads = figure.get("loads") or ([figure["load"]] if figure.get("load") else [])
            # How much an arm serves within a limit is read off all of its loads.
            if test["relation"] == "serves_no_more":
                loads = []
            found |= dict.fromkeys(those(layouts, workloads, loads))
    return list(found)


def _invalid(place: Place, base: str, cells: Iterable[str]) -> list[str]:
    """Cells whose checks say that their numbers mean nothing: statistics leave them out."""
    return [
        cell
        for cell in cells
        if (place.json(f"{base}/parts/{cell}/checks.json") or {}).get("verdict") == "invalid"
    ]
