# SPDX-License-Identifier: Apache-2.0
"""One experiment as the workflow sees it: its cells, where every file goes, and what each rule depends on.

Paths are relative to the folder that Snakemake works in, so that results can be moved as a whole.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import splitbench
from splitbench.console import QUIET as QUIET
from splitbench.console import say as say
from splitbench.environment.expectations import read_stack_file
from splitbench.environment.needs import READ_BY_RULES, needs_of
from splitbench.errors import UserError
from splitbench.experiment.cells import Cells, model_slice, stack_slice
from splitbench.experiment.load import check_sources, load_experiment
from splitbench.figures.spec import FigureSpec
from splitbench.files import canonical_json, digest8
from splitbench.serving.plan_script import script as script_of_plan
from splitbench.serving.state import Owner

CELL_PATTERN = r"[^/]+/[^/]+/c\d+/\d+-\d+"
REPOSITORY = Path(splitbench.__file__).resolve().parent.parent


class Workflow:
    """Paths and slices of one experiment.

    Args:
        config: the whole config as plain data.
        files: where it was read from, for messages.
        root: the folder that relative paths of the config are read from.
        sources: whether the model's folder must be there; whoever only looks at results does without it.

    Raises:
        UserError: the config is wrong; one line a problem.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        files: Sequence[Path] = (),
        root: Path = REPOSITORY,
        *,
        sources: bool = True,
    ) -> None:
        self.files = tuple(files)
        self.experiment = load_experiment(config, files)
        if sources:
            check_sources(self.experiment, root)
        self.root = root
        expects = self.experiment.stack.expects
        self.expects = read_stack_file(root / expects) if expects is not None else None
        self.results = f"results/{self.experiment.experiment}"
        self.cells = Cells(self.experiment, root)
        self.stack = stack_slice(self.experiment, root)
        self.model = model_slice(self.experiment)

    @property
    def config_argument(self) -> str:
        """How a person names this experiment to snakemake; empty for the default one.

        From the folder of the run where it lies below that: Snakemake states it from the root of the machine, whose
        folders are nobody's business in a report.
        """
        if not self.files:
            return ""
        file, here = self.files[-1], Path.cwd()
        if file.is_relative_to(here):
            file = file.relative_to(here)
        return "" if file == Path("config/config.yaml") else f"--configfile {shlex.quote(str(file))}"

    # Names of folders that carry the digest of what they hold.

    @property
    def stack_key(self) -> str:
        """`<stack>-<hash8>`."""
        return f"{self.experiment.stack.name}-{digest8(self.stack)}"

    @property
    def model_key(self) -> str:
        """`<model>-<hash8>`."""
        return f"{self.experiment.model.name}-{digest8(self.model)}"

    def path(self, pattern: str) -> str:
        """A path (or a pattern with wildcards) below this experiment's results."""
        return f"{self.results}/{pattern}"

    # The store holds what is made from locks and specs and can be made again: not results.

    @property
    def serving_folder(self) -> Path:
        """Where the serving environment is built."""
        return store() / "envs" / self.stack_key

    @property
    def serving_python(self) -> Path:
        """Interpreter that has vLLM."""
        given = self.experiment.stack.python
        return self.root / given if given is not None else self.serving_folder / "bin" / "python"

    @property
    def model_source(self) -> str:
        """What engines are given as the model: a folder, or a hub id."""
        model = self.experiment.model
        if model.hub is not None:
            return model.hub
        if model.path is not None:
            return str((self.root / model.path).resolve())
        return str((store() / "models" / self.model_key).resolve())

    # What rules depend on, as canonical text: Snakemake compares params as text.

    def cell_slice(self, cell: str) -> str:
        """Everything a cell's numbers depend on."""
        return canonical_json(self.cells[cell].slice)

    def cell_priority(self, cell: str) -> int:
        """Snakemake starts the highest first; cells go before everything else, in the recorded order."""
        return len(self.cells) - self.cells.order(cell)

    def plan_text(self, layout: str) -> str:
        """The launch plan of one layout."""
        return canonical_json(self.cells.plans[layout].model_dump(mode="json"))

    def plan_script(self, layout: str) -> str:
        """The same as a commented shell script, with this repository's usual places."""
        stack, model = self.experiment.stack, self.experiment.model
        given = (
            str(stack.python) if stack.python is not None else f".splitbench/envs/{self.stack_key}/bin/python"
        )
        folder = str(model.path) if model.path is not None else f".splitbench/models/{self.model_key}"
        places = {
            "serving_python": _from_repository(given),
            "workflow_python": "./.venv/bin/python",
            "model": model.hub if model.hub is not None else _from_repository(folder),
        }
        return script_of_plan(self.experiment, self.cells.plans[layout], places)

    @property
    def first_cells(self) -> list[str]:
        """Of every layout the cell with the least to do: does it come up, and is it sound?"""
        least: dict[str, tuple[int, int, str]] = {}
        for cell in self.cells.all:
            tokens = cell.prompts * (int(cell.load["input_tokens"]) + int(cell.load["output_tokens"]))
            work = (tokens, cell.concurrency, cell.cell_id)
            if cell.restart == cell.repeat == 0:
                least[cell.layout] = min(least.get(cell.layout, work), work)
        return [cell_id for *_, cell_id in least.values()]

    @property
    def figure_names(self) -> list[str]:
        """Names of all figures, `<figure>-<workload>`."""
        return [
            f"{figure}-{workload}"
            for workload in self.experiment.workloads
            for figure in self.experiment.figures
        ]

    def figure_spec(self, name: str) -> FigureSpec:
        """What a figure shows.

        Raises:
            UserError: there is no such figure.
        """
        figure, _, workload = name.partition("-")
        if figure not in self.experiment.figures or workload not in self.experiment.workloads:
            raise UserError(f"no figure '{name}'", mend=f"use one of: {', '.join(self.figure_names)}")
        return self.experiment.figure_spec(figure, workload)

    def figure_text(self, name: str) -> str:
        """What a figure depends on in the config."""
        return canonical_json(self.figure_spec(name).model_dump(mode="json"))

    def section(self, name: str, without: frozenset[str] = frozenset()) -> str:
        """One section of the config with its defaults, less some of its keys."""
        values = self.experiment.model_dump(mode="json", include={name})[name]
        kept = {key: value for key, value in values.items() if key not in without} if without else values
        return canonical_json(kept)

    def check_text(self) -> str:
        """What the check of the environment depends on: expectations, needs, and what follows a mismatch.

        Ports are left out: nothing about them is worth checking again when they change.
        """
        needs = asdict(replace(needs_of(self.cells.plans), ports=()))
        for engine in needs["engines"]:
            engine["env"] = {name: engine["env"].get(name) for name in READ_BY_RULES}
            del engine["name"], engine["layout"]
        needs["engines"] = sorted(needs["engines"], key=canonical_json)
        return canonical_json(
            {
                "expects": self.expects.model_dump(mode="json") if self.expects is not None else None,
                "needs": needs,
                "mode": self.experiment.check,
            }
        )

    @property
    def floor_path(self) -> str:
        """What the self-test found out about the client: of this machine, and of the client's version."""
        return self.path(f"environment/client-{self.stack_key}.json")

    @property
    def asked_percentiles(self) -> str:
        """What decides how many requests are enough: the percentile asked for, and how many cells are pooled."""
        matrix = self.experiment.matrix
        return f"P{self.experiment.slo.percentile:g} over {matrix.restarts * matrix.repeats} cells"


def _from_repository(path: str) -> str:
    return path if path.startswith("/") else f"./{path}"


def cell_id(wildcards: Any) -> str:
    """The cell that a rule's wildcards name: as one, or in parts."""
    if hasattr(wildcards, "cell"):
        return str(wildcards.cell)
    return f"{wildcards.layout}/{wildcards.load}/{wildcards.restart}-{wildcards.repeat}"


def store() -> Path:
    """Folder for environments and models that are made from locks and specs; `SPLITBENCH_STORE` moves it."""
    return Path(os.environ.get("SPLITBENCH_STORE", ".splitbench")).resolve()


_NO_ROOM = ("can't be written", "make room, then run again")
_NO_RIGHT = ("can't be written", "mend the rights, then run again")
_GONE = ("has gone while the workflow ran", "leave its folders alone, and run again")
# What the machine or a person does to files under a run, and what to do about it. Anything else is our mistake.
_FAILED: Mapping[int, tuple[str, str]] = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EROFS: _NO_RIGHT,
    errno.EACCES: _NO_RIGHT,
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _GONE,
    errno.ESTALE: _GONE,
    errno.EIO: ("can't be read or written", "look at the disk (dmesg), then run again"),
}


@contextmanager
def script(log: str | None = None) -> Iterator[Callable[[str], None]]:
    """Run a rule's work: progress goes to the terminal and the log, a user's error is one line and exit code 1.

    The work is interrupted when the workflow that asked for it is gone, however that ended.

    Yields:
        a function that takes a line of progress.
    """
    path = Path(log) if log else None

    def keep(text: str, mode: str = "a") -> None:
        # What is said is on the terminal already: a full disk must not hide it.
        if path is not None:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open(mode, encoding="utf-8") as handle:
                    handle.write(text)

    def note(line: str) -> None:
        say(line)
        keep(f"{line}\n")

    keep("", "w")

    # A termination is cleaned up after like an interrupt: half-written files go, the status says what happened.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _interrupt_without_owner()
    try:
        yield note
    except UserError as error:
        note(f"error: {error}")
        if path is not None and error.__cause__ is not None:
            with path.open("a", encoding="utf-8") as handle:
                traceback.print_exception(error.__cause__, file=handle)
        sys.exit(1)
    except OSError as error:
        what = _FAILED.get(error.errno or 0)
        if what is None:
            raise
        keep(traceback.format_exc())
        note(f"error: {error.filename or 'a file'}: {what[0]} ({error.strerror}); {what[1]}")
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)


def _interrupt_without_owner() -> None:
    """Interrupt this process once the snakemake that it works for is gone; its end may have been SIGKILL."""
    owner = Owner.from_env(os.environ)
    if owner is None:
        return

    def watch() -> None:
        while owner.alive():
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True, name="owner").start()
