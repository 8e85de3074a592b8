# SPDX-License-Identifier: Apache-2.0
"""`splitbench bundle` and `splitbench bootstrap`: a GPU node without network gets what it lacks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from splitbench.environment.bootstrap import BundleError, bootstrap, check_imports
from splitbench.environment.bundle import make_bundle
from splitbench.errors import UserError
from splitbench.workflow import say

BUNDLES = Path("envs/bundles")


def add_commands(commands: Any) -> None:
    """Add both to an argparse sub-parser collection."""
    make = commands.add_parser("bundle", help="make an offline bundle for a GPU node without network")
    make.add_argument("stack", help=f"a file of {BUNDLES}, or its name without the ending")
    make.add_argument("out", type=Path, help="folder of the bundle; an older bundle there is replaced")
    make.add_argument("--wheels", type=Path, help="keep the wheels here, for the next time")
    make.set_defaults(run=_bundle)
    unpack = commands.add_parser("bootstrap", help="unpack an offline bundle (there: python3 bootstrap.py)")
    unpack.add_argument("bundle", type=Path, help="folder of the bundle, with one carry or all of them")
    unpack.add_argument("folder", type=Path, help="the environment; stack.python is its bin/python")
    unpack.add_argument("--check", nargs="*", default=[], metavar="MODULE", help="then import these")
    unpack.set_defaults(run=_bootstrap)


def _bundle(arguments: argparse.Namespace) -> int:
    named = Path(arguments.stack)
    source = named if named.suffix == ".yaml" else BUNDLES / f"{named}.yaml"
    manifest = make_bundle(source, arguments.out, wheels=arguments.wheels, progress=say)
    say(f"{arguments.out}: {len(manifest['packages'])} packages in {manifest['carries']} carries")
    return 0


def _bootstrap(arguments: argparse.Namespace) -> int:
    carries = sorted(arguments.bundle.glob("carry-*"))
    try:
        record = bootstrap(arguments.folder.absolute(), carries)
    except BundleError as error:
        raise UserError(str(error), where=str(arguments.bundle)) from None
    say(f"{arguments.folder}: ready after {record['seconds']} s, {record['missing']} carries missing")
    failed = check_imports(arguments.folder.absolute(), arguments.check) if arguments.check else []
    for line in failed:
        say(f"error: {line}")
    return 1 if failed else 0
