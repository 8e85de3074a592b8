# SPDX-License-Identifier: Apache-2.0
"""Time and memory to build and to verify an archive of 48 cells of the reference experiment's size."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

# Those that the source measured; the experiment has two more.
LAYOUTS = ("agg-tp4", "pd-tp2", "agg-tp8", "pd-tp4")
LIMITS_S = {"build": 60.0, "verify": 120.0}
LIMIT_MIB = 1024.0


def config() -> dict[str, object]:
    """The reference experiment: 4 layouts x 2 workloads x 6 loads, 10 prompts per concurrency, 1,024 tokens each."""
    found = dict(
        yaml.safe_load((REPOSITORY / "config/experiments/sakura-h100.yaml").read_text(encoding="utf-8"))
    )
    found["layouts"] = {name: found["layouts"][name] for name in LAYOUTS}
    return found


def make(folder: Path, tokenizer: str) -> None:
    """Generated results with the real numbers of requests and tokens."""
    from tests.fakes.finished_results import finish

    finish(folder, config(), root=REPOSITORY, tokenizer=tokenizer, log="engine up\n" * 20_000)


def build(folder: Path) -> None:
    """One archive."""
    from splitbench.archive.build import build_archive
    from splitbench.workflow import Workflow

    os.chdir(folder)
    flow = Workflow(config(), [Path("experiment.yaml")], REPOSITORY)
    build_archive(flow, config(), "--configfile experiment.yaml", folder / "archive.zip", known={})


def check(folder: Path) -> None:
    """The check of it; ends with an error if the archive does not hold."""
    from splitbench.archive.verify import verify

    found = verify(folder / "archive.zip", print)
    if found.differs:
        sys.exit(f"does not hold: {found.differs[:3]}")


def inner(case: str, folder: Path, tokenizer: str) -> None:
    """Run one case in this process; print seconds by the clock, of the processor, and the peak in MiB."""
    wall, cpu = time.perf_counter(), time.process_time()
    {
        "make": lambda: make(folder, tokenizer),
        "build": lambda: build(folder),
        "verify": lambda: check(folder),
    }[case]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"RESULT {time.perf_counter() - wall:.1f} {time.process_time() - cpu:.1f} {peak:.0f}")


def main() -> int:
    """Make, build, verify; exit code 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep everything here instead of a scratch folder")
    parser.add_argument(
        "--secret", action="store_true", help="a home path in every raw file, so that all is made again"
    )
    parser.add_argument("--inner", choices=("make", "build", "verify"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tokenizer = "/home/somebody/models/m" if arguments.secret else "/srv/models/m"
    if arguments.inner:
        inner(arguments.inner, arguments.folder, tokenizer)
        return 0
    missed = False
    with tempfile.TemporaryDirectory(prefix="archive-") as scratch:
        folder = (arguments.folder or Path(scratch)).resolve()
        print("| stage | s by the clock | s of the processor | peak MiB | limit |\n|---|---|---|---|---|")
        for case in ("make", "build", "verify"):
            command = [sys.executable, __file__, "--inner", case, "--folder", str(folder)]
            done = subprocess.run(
                [*command, *(["--secret"] if arguments.secret else [])],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                sys.exit(done.stdout + done.stderr)
            wall, cpu, peak = done.stdout.rsplit("RESULT ", 1)[1].split()
            limit = LIMITS_S.get(case)
            missed |= limit is not None and (float(wall) > limit or float(peak) > LIMIT_MIB)
            print(
                f"| {case} | {wall} | {cpu} | {peak} | {'' if limit is None else f'{limit:g} s, {LIMIT_MIB:g} MiB'} |"
            )
        raw = sum(path.stat().st_size for path in folder.rglob("results/*/cells/**/*.json"))
        print(f"\nraw {raw / 1e6:.0f} MB, archive {(folder / 'archive.zip').stat().st_size / 1e6:.0f} MB")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
