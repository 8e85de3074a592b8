# SPDX-License-Identifier: Apache-2.0
"""A probe: where its text comes from, how text becomes facts, and how long it may take.

A tool or file that is not there makes a probe `absent`, one that fails or takes too long makes it `failed` with the
reason; neither is an error of the run. Parsers are pure functions of text, so that they are tested on kept outputs.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Facts = dict[str, Any]

# Where tools lie that a login shell of root knows and a job does not.
MORE_PATH = ("/usr/local/cuda/bin", "/usr/local/nvidia/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")
_LONGEST = 8_000_000  # characters; nothing that is parsed here comes near


class AbsentError(Exception):
    """The tool, file or device is not on this machine."""


class FailedError(Exception):
    """The source is there and gave nothing that can be used; the text says why, in one line."""


class NotUnderstoodError(FailedError):
    """The text is not of the form that the parser knows."""


class Source(Protocol):
    """Where a probe's text comes from."""

    def read(self, limit_s: float) -> str:
        """The text.

        Raises:
            AbsentError: there is no such tool or file here.
            FailedError: it gave no answer, or not in time.
        """

    def __str__(self) -> str: ...


@dataclass(frozen=True)
class Command:
    """The standard output of a program, in the C locale."""

    argv: tuple[str, ...]
    accept: frozenset[int] | None = frozenset({0})
    """Exit codes that come with a usable answer; None: all of them."""
    env: Mapping[str, str] = field(default_factory=dict)
    complaints: bool = False
    """Whether what it says on standard error is part of the answer."""

    def read(self, limit_s: float) -> str:
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), *MORE_PATH])
        program = shutil.which(self.argv[0], path=path)
        if program is None:
            raise AbsentError
        argv = [program, *self.argv[1:]]
        return _output(argv, self._environment(path), limit_s, self.accept, self.complaints)

    def _environment(self, path: str) -> dict[str, str]:
        return {**os.environ, "PATH": path, "LC_ALL": "C", "LANGUAGE": "C", "TERM": "dumb", **self.env}

    def __str__(self) -> str:
        return " ".join([Path(self.argv[0]).name, *self.argv[1:]])


@dataclass(frozen=True)
class TextFile:
    """The content of a file."""

    path: str

    def read(self, limit_s: float) -> str:
        del limit_s
        try:
            return _text(Path(self.path))
        except (FileNotFoundError, NotADirectoryError):
            raise AbsentError from None
        except OSError as error:
            raise FailedError(error.strerror or type(error).__name__) from None

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Tree:
    """Small files that match patterns, as one line each: the path, a tab, the content's first line.

    A matching folder or device gives a line with nothing after the tab.
    """

    patterns: tuple[str, ...]

    def read(self, limit_s: float) -> str:
        del limit_s
        lines = []
        for pattern in self.patterns:
            for name in sorted(glob.glob(pattern)):  # noqa: PTH207 (absolute patterns)
                path = Path(name)
                content = ""
                if path.is_file():
                    try:
                        content = _text(path).strip().split("\n", 1)[0]
                    except OSError:  # sysfs files of an inactive port can't be read
                        continue
                lines.append(f"{name}\t{content}")
        if not lines:
            raise AbsentError
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return " ".join(self.patterns)


@dataclass(frozen=True)
class Ask:
    """What the running process is told by the operating system or a library, as text."""

    what: str
    function: Callable[[], str]

    def read(self, limit_s: float) -> str:
        del limit_s
        return self.function()

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Probe:
    """One source and its parser.

    Args:
        name: unique; what the record's `probes` are keyed by.
        source: where the text comes from.
        parse: text to facts: sections of the machine's record, what changes by itself under `moment`.
        limit_s: longest time that the source may take.
    """

    name: str
    source: Source
    parse: Callable[[str], Facts]
    limit_s: float = 5.0


@dataclass
class Outcome:
    """What came of a probe."""

    name: str
    source: str
    status: str
    seconds: float = 0.0
    facts: Facts = field(default_factory=dict)


def run_probe(probe: Probe) -> Outcome:
    """Run one probe; whatever goes wrong is its outcome, never an exception."""
    outcome = Outcome(probe.name, str(probe.source), "ok")
    began = time.monotonic()
    try:
        outcome.facts = probe.parse(probe.source.read(probe.limit_s))
    except AbsentError:
        outcome.status = "absent"
    except FailedError as error:
        outcome.status = f"failed: {_one_line(str(error))}"
    except Exception as error:  # a parser met an output that nobody has seen: that is a fact, not a crash
        outcome.status = f"failed: not understood ({type(error).__name__})"
    outcome.seconds = round(time.monotonic() - began, 3)
    return outcome


def run_probes(probes: Sequence[Probe]) -> list[Outcome]:
    """Run probes side by side; one that hangs (a driver that does not answer) holds up nobody else.

    Returns:
        an outcome for every probe, in their order.
    """
    found: dict[str, Outcome] = {}

    def run(probe: Probe) -> None:
        found[probe.name] = run_probe(probe)

    # Daemon threads: a read that never returns must not keep this process from ending.
    threads = [threading.Thread(target=run, args=(probe,), daemon=True, name=probe.name) for probe in probes]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    outcomes = []
    for probe, thread in zip(probes, threads, strict=True):
        # A killed tool gets a second to go; the parser's time is little.
        thread.join(max(0.0, began + probe.limit_s + 2.0 - time.monotonic()))
        late = Outcome(probe.name, str(probe.source), f"failed: no answer in {probe.limit_s:g} s")
        outcomes.append(found.get(probe.name, late))
    return outcomes


def merge(into: Facts, more: Mapping[str, Any]) -> None:
    """Add facts that are not known yet; what an earlier probe said stays."""
    for key, value in more.items():
        known = into.get(key)
        if isinstance(known, dict) and isinstance(value, Mapping):
            merge(known, value)
        elif known is None:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _output(
    argv: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    accept: frozenset[int] | None,
    complaints: bool,
) -> str:
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if complaints else subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        raise FailedError(error.strerror or type(error).__name__) from None
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(child)
        raise FailedError(f"no answer in {limit_s:g} s") from None
    if accept is not None and child.returncode not in accept:
        said = _one_line((err or b"").decode("utf-8", "replace") or out.decode("utf-8", "replace"))
        raise FailedError(f"exit code {child.returncode}" + (f", {said}" if said else ""))
    return out[:_LONGEST].decode("utf-8", "replace")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what we started, its children too; a process stuck in a driver is left to the kernel."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(timeout=1)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def _text(path: Path) -> str:
    with path.open("rb") as handle:
        return handle.read(_LONGEST).decode("utf-8", "replace")


def _one_line(text: str, longest: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1] + "…"
