# SPDX-License-Identifier: Apache-2.0
"""`splitbench import FILE...`: other tools' results beside ours."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from splitbench.errors import UserError
from splitbench.tables.importers import import_file
from splitbench.tables.schema import TABLES

HELP = "import result files of vLLM, SGLang, AIPerf, GenAI-Perf, guidellm, inference-perf, InferenceX or HF"

_TEXT = ("experiment", "layout", "workload", "connector", "stack", "client_version")
_WHOLE = ("concurrency", "budget", "input_tokens_asked", "output_tokens_asked", "restart", "repeat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="result files, of any of these tools"
    )
    parser.add_argument(
        "--into",
        type=Path,
        default=Path("results/imported/cells"),
        help="folder of the cells (default: results/imported/cells)",
    )
    # Each fills the column of its name.
    meaning = {column.name: column.meaning.replace("%", "%%") for column in TABLES["cells"].columns}
    known = parser.add_argument_group("what the files do not say")
    for name in _TEXT:
        known.add_argument(f"--{name.replace('_', '-')}", help=meaning[name])
    for name in _WHOLE:
        known.add_argument(f"--{name.replace('_', '-')}", type=int, help=meaning[name])
    known.add_argument("--request-rate", type=float, help=meaning["request_rate"])
    known.add_argument("--kind", choices=("aggregated", "pd", "replicas"), help=meaning["kind"])
    known.add_argument("--first-token", choices=("prefiller", "decoder"), help=meaning["first_token"])
    known.add_argument("--budget-kind", choices=("cores", "gpus"), help=meaning["budget_kind"])


def run(args: argparse.Namespace) -> int:
    """Import every file that can be; exit code 1 if any could not, each with one line on standard error."""
    names = (*_TEXT, *_WHOLE, "request_rate", "kind", "first_token", "budget_kind")
    identity = {name: getattr(args, name) for name in names}
    identity["experiment"] = identity["experiment"] or "imported"
    failed = 0
    for path in args.files:
        try:
            for cell_id, _ in import_file(path, args.into, identity):
                sys.stdout.write(f"{path}: {cell_id}\n")
        except UserError as error:
            failed += 1
            sys.stderr.write(f"{error}\n")
    return 1 if failed else 0
