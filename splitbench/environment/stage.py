# SPDX-License-Identifier: Apache-2.0
"""The environment stage as the workflow calls it: serving software, model, and a record of the machine."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from splitbench.environment.check import Check, check
from splitbench.environment.interpreters import find_uv
from splitbench.environment.needs import needs_of
from splitbench.environment.probe import fingerprint, probe_environment
from splitbench.environment.serving_environment import build_serving_environment
from splitbench.errors import UserError
from splitbench.files import read_json, write_json
from splitbench.serving.ending import status as session_status
from splitbench.serving.synthetic_model import RECORD, make_synthetic_model
from splitbench.workflow import Workflow

Note = Callable[[str], None]


def ensure_serving(flow: Workflow, note: Note, log: Path | None = None) -> dict[str, Any]:
    """The serving environment of an experiment: built from its lock unless it is there, or the given one.

    Returns:
        its record: at least `packages`, a mapping of names to versions.

    Raises:
        UserError: it can't be built, or the given one has other versions than the config states.
    """
    stack = flow.experiment.stack
    if stack.lock is None:
        found = packages_of(flow.serving_python)
        for package, version in stack.packages.items():
            if found.get(package) != version:
                raise UserError(
                    f"{flow.serving_python} has {package} {found.get(package, 'not at all')}",
                    where=f"stack.packages.{package}",
                    mend=f"state the version that is there, or install {version}",
                )
        return {"packages": found} | _bundle_of(flow.serving_python)
    serving = build_serving_environment(
        flow.root / stack.lock,
        flow.serving_folder,
        uv=find_uv(),
        torch_cpu_index=stack.torch_cpu_index,
        log=log or flow.serving_folder.with_suffix(".log"),
        progress=note,
    )
    return serving.model_dump(mode="json")


def _bundle_of(python: Path) -> dict[str, Any]:
    """What an offline bundle says of itself, where the interpreter came out of one: its binaries were slimmed."""
    try:
        record = read_json(python.parent.parent / "bundle.json")
    except (OSError, ValueError):
        return {}
    return {
        "bundle": {
            key: record.get(key) for key in ("name", "digest", "gpu_architecture", "slimmed", "dropped")
        }
    }


def packages_of(python: Path) -> dict[str, str]:
    """Distributions that an interpreter sees, by name.

    Raises:
        UserError: it can't be run.
    """
    program = (
        # The path may hold a package twice; the first is the one that is imported.
        "import importlib.metadata as m, json;"
        "found = [(d.metadata['Name'], d.version) for d in m.distributions() if d.metadata['Name']];"
        "print(json.dumps(dict(reversed(found))))"
    )
    try:
        shown = subprocess.run(
            [str(python), "-c", program], capture_output=True, text=True, check=True, timeout=60
        )
        return {str(name): str(version) for name, version in json.loads(shown.stdout).items()}
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError) as error:
        raise UserError(
            f"{python} can't be asked for its packages ({error})",
            where="stack.python",
            mend="name an interpreter that runs",
        ) from None


def ensure_model(flow: Workflow, note: Note) -> dict[str, Any]:
    """The model of an experiment: made if it is synthetic and not there yet, otherwise only described."""
    model = flow.experiment.model
    if model.synthetic is None:
        return {"name": model.name, "source": str(model.path or model.hub), "revision": model.revision}
    folder = Path(flow.model_source)
    record = folder / RECORD
    if record.exists():
        return read_json(record)
    note(f"making the synthetic model {flow.model_key}")
    return make_synthetic_model(model.synthetic, folder)


def write_serving(flow: Workflow, output: Path, log: Path, note: Note) -> None:
    """Build the serving environment and keep a record of it with the results."""
    serving = ensure_serving(flow, note, log)
    write_json(output, {"stack": flow.stack, "key": flow.stack_key} | serving)


def write_model(flow: Workflow, output: Path, note: Note) -> None:
    """Make or find the model and keep a record of it with the results."""
    write_json(output, {"model": flow.model, "key": flow.model_key} | ensure_model(flow, note))


def write_probe(flow: Workflow, serving: Path, output: Path, note: Note) -> None:
    """Record the machine together with the serving software that was found on it."""
    record = probe_environment(flow.serving_python, read_json(serving))
    states = {name: str(probe["status"]) for name, probe in record["probes"].items()}
    count = list(states.values()).count
    line = f"{count('ok')} of {len(states)} probes answered, {count('absent')} have nothing to look at here"
    failed = sorted(name for name, state in states.items() if state.startswith("failed"))
    if failed:
        line += f"; {', '.join(failed)} failed (why: {output}), which keeps nothing from running"
    note(line)
    keep(flow, record)
    write_json(output, record)


def keep(flow: Workflow, record: Mapping[str, Any]) -> None:
    """Keep a record under its digest too, which is how cells point to it: a later probe must not take it away."""
    kept = kept_record(flow, record["digest"])
    if not kept.exists():
        write_json(kept, record)


def kept_record(flow: Workflow, digest: str) -> Path:
    """Where the record of an environment is kept."""
    return Path(flow.path(f"environment/kept/{digest[:16]}.json"))


def check_environment(flow: Workflow, record: Mapping[str, Any]) -> Check:
    """What speaks against measuring an experiment in an environment."""
    # Processes and ports of a session that is up already are its own, not a stranger's.
    up = bool(session_status()["supervisor"])
    return check(record, needs_of(flow.cells.plans, session_up=up), flow.expects)


def write_check(flow: Workflow, probe: Path, output: Path, log: Path, note: Note) -> None:
    """Compare the environment with what the experiment expects; record it.

    The table goes to the log, and to the person who watches where something does not fit.

    Raises:
        UserError: it does not fit, and the config does not say `check: warn`.
    """
    mode = flow.experiment.check
    result = check_environment(flow, read_json(probe))
    if result.fits:
        with log.open("a", encoding="utf-8") as handle:
            handle.writelines(f"{line}\n" for line in result.text())
        for finding in result.findings:
            note(f"{finding.message} [{finding.rule}]")
    else:
        for line in result.text():
            note(line)
    if not result.fits and mode == "fail":
        raise UserError(
            f"this machine does not fit the experiment: {result.summary()}",
            where=str(flow.experiment.stack.expects or probe),
            mend="mend what the table says, or go on in spite of it with --config check=warn",
        )
    if not result.fits:
        note(f"going on in spite of it (check: warn): {result.summary()}")
    write_json(output, result.as_json(mode) | {"asked": _asked(flow)})


def _asked(flow: Workflow) -> str:
    return hashlib.sha256(flow.check_text().encode()).hexdigest()


def checked(flow: Workflow, probe: Path, output: Path, log: Path, note: Note) -> None:
    """The same, where the experiment asks something else of the machine than what the record answers.

    Raises:
        UserError: it does not fit, and the config does not say `check: warn`.
    """
    if read_json(output).get("asked") != _asked(flow):
        write_check(flow, probe, output, log, note)


def environment_now(flow: Workflow, recorded: Path, serving: Mapping[str, Any], note: Note) -> Path:
    """The record of the environment that a cell is about to run in.

    That is the one that was recorded, unless this is another machine (a results folder that moved, a node of another
    kind) or it was changed since (a driver, packages): then what is here is probed and kept.
    """
    record = read_json(recorded)
    if "schema" not in record or record["fingerprint"] == fingerprint():
        return recorded
    note("this is not the machine as it was probed; probing it again")
    here = probe_environment(flow.serving_python, serving)
    keep(flow, here)
    return kept_record(flow, here["digest"])
