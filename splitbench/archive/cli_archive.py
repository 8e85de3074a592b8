# SPDX-License-Identifier: Apache-2.0
"""`splitbench verify`, `restore`, `trace` and `compare`: what a person does with archives."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from splitbench.archive.unpack import LIMITS, Limits
from splitbench.errors import UserError

_GIB = 1 << 30


def add_commands(commands: Any) -> None:
    """Add the four commands to the parser's subparsers."""
    verify = commands.add_parser("verify", help="check an archive: manifest, tables, figures, report")
    verify.add_argument("archive", type=Path)
    verify.add_argument("--json", action="store_true", help="the verdict as JSON")
    _limits(verify)
    verify.set_defaults(run=_verify)
    restore = commands.add_parser("restore", help="unpack an archive so that snakemake can go on from it")
    restore.add_argument("archive", type=Path)
    restore.add_argument("folder", type=Path, help="a new folder")
    _limits(restore)
    restore.set_defaults(run=_restore)
    trace = commands.add_parser("trace", help="what a figure, table, number or other result rests on")
    trace.add_argument(
        "file", help="the file, or a number's id in the report; with --in, its path (results/...)"
    )
    trace.add_argument(
        "--in", dest="archive", type=Path, help="an archive that holds it; for an id also results/EXPERIMENT"
    )
    trace.add_argument(
        "--configfile",
        type=Path,
        default=Path("config/config.yaml"),
        help="the experiment's config, for its lines",
    )
    trace.add_argument("--json", action="store_true", help="the chain as JSON")
    trace.set_defaults(run=_trace)
    compare = commands.add_parser("compare", help="two archives: environment, cells with intervals, claims")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    compare.add_argument("--json", action="store_true", help="the comparison as JSON")
    _limits(compare)
    compare.set_defaults(run=_compare)


def _limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-gib",
        type=float,
        default=LIMITS.total_bytes / _GIB,
        help=f"unpack at most so much (default: {LIMITS.total_bytes // _GIB})",
    )
    parser.add_argument(
        "--max-files",
        type=int,
        default=LIMITS.files,
        help=f"unpack at most so many files (default: {LIMITS.files})",
    )


def _given(arguments: argparse.Namespace) -> Limits:
    return Limits(files=arguments.max_files, total_bytes=int(arguments.max_gib * _GIB))


def _verify(arguments: argparse.Namespace) -> int:
    from splitbench.archive.verify import verify

    def say(line: str) -> None:
        if not arguments.json:
            sys.stdout.write(f"ok       {line}\n")
            sys.stdout.flush()

    found = verify(arguments.archive, say, _given(arguments))
    if arguments.json:
        sys.stdout.write(
            json.dumps({"ok": found.ok, "passed": found.passed, "differs": found.differs}, indent=2) + "\n"
        )
    else:
        for name, what in found.differs:
            sys.stdout.write(f"differs  {name}: {what}\n")
        verdict = "holds" if found.ok else f"does not hold: {len(found.differs)} difference(s)"
        sys.stdout.write(f"{arguments.archive.name} {verdict}\n")
    return 0 if found.ok else 1


def _restore(arguments: argparse.Namespace) -> int:
    from splitbench.archive.verify import restore

    folder = restore(arguments.archive, arguments.folder, _given(arguments))
    sys.stdout.write(
        f"restored to {folder}; there: snakemake --snakefile workflow/Snakefile --configfile experiment.yaml -n\n"
    )
    return 0


def _trace(arguments: argparse.Namespace) -> int:
    from splitbench.archive import place, trace
    from splitbench.archive.trace_number import is_number, trace_number

    number = is_number(arguments.file)
    if arguments.archive is not None and arguments.archive.is_file():
        with place.in_archive(arguments.archive) as inside:
            found = (trace_number if number else trace.trace)(inside, arguments.file)
    elif number:
        found = trace_number(_results(arguments.archive, arguments.configfile), arguments.file)
    else:
        results, name = place.results_of(Path(arguments.file))
        config = results.parent.parent / "experiment.yaml"
        found = trace.trace(
            place.on_disk(results, config if config.is_file() else arguments.configfile), name
        )
    sys.stdout.write(trace.as_json(found) if arguments.json else trace.words(found))
    return 0


def _results(folder: Path | None, configfile: Path) -> Any:
    """The results that a number's id is looked up in: the folder that was named, else the config's experiment's."""
    from splitbench.archive import place
    from splitbench.experiment.load import read_yaml

    if folder is None:
        folder = Path("results") / str(read_yaml(configfile).get("experiment"))
    if not (folder / "report.html").is_file():
        raise UserError(
            "holds no report",
            where=str(folder),
            mend="name a folder results/EXPERIMENT, or an archive, by --in",
        )
    config = folder.absolute().parent.parent / "experiment.yaml"
    return place.on_disk(folder.absolute(), config if config.is_file() else configfile)


def _compare(arguments: argparse.Namespace) -> int:
    from splitbench.archive import compare

    found = compare.compare(arguments.a, arguments.b, _given(arguments))
    sys.stdout.write(compare.as_json(found) if arguments.json else compare.words(found))
    return 0
