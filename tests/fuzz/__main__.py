# SPDX-License-Identifier: Apache-2.0
"""The campaign: `python -m tests.fuzz [TARGET ...] --examples 5000 --seed 1`.

One line a target; exit code 1 on any fault.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.fuzz.running import TARGETS, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--examples", type=int, default=1000, help="of each target")
    parser.add_argument("--seed", type=int, default=1, help="from which they are drawn")
    parser.add_argument("--brief", action="store_true", help="of a fault only the end of its traceback")
    options = parser.parse_args()
    faults = 0
    for name in options.targets or TARGETS:
        started = time.monotonic()
        try:
            run(name, examples=options.examples, seed=options.seed)
            said = "no fault"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            faults += 1
            lines = traceback.format_exception(error)
            print("".join(lines if not options.brief else lines[-1:]), file=sys.stderr)
            said = f"FAULT {type(error).__name__}"
        print(f"{name}: {options.examples} examples, {time.monotonic() - started:.0f} s, {said}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
