# SPDX-License-Identifier: Apache-2.0
"""The same measurements give the same bytes: tables, statistics, figures, report, archive, in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from splitbench.workflow import REPOSITORY
from tests.unit.archive.conftest import Finished

PROGRAM = """
import sys
from pathlib import Path
from splitbench.archive.build import build_archive
from tests.fakes.finished_results import finish, small_config
folder, root = map(Path, sys.argv[1:])
flow = finish(folder, small_config(), root=root)
build_archive(flow, small_config(), "--configfile experiment.yaml", folder / "tiny.zip", folder=folder, known={})
"""


def test_another_process_gives_the_same_bytes(finished: Finished, tmp_path: Path) -> None:
    folder = tmp_path / "other folder"
    # What must not count: the order of sets, the zone, the language, threads, where it is.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "12345", "TZ": "Asia/Tokyo"}
    environment |= {"LC_ALL": "C", "OMP_NUM_THREADS": "1", "COLUMNS": "40", "MPLBACKEND": "agg"}
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(finished.root)],
        env=environment,
        check=True,
        cwd=tmp_path,
    )
    here = {path.relative_to(finished.folder): path for path in finished.folder.rglob("*") if path.is_file()}
    there = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    wanted = {
        name for name in here if name.parts[0] == "results" or name.name in ("experiment.yaml", "tiny.zip")
    }
    assert wanted == set(there)
    differ = sorted(str(name) for name in wanted if here[name].read_bytes() != there[name].read_bytes())
    assert differ == []
    kinds = {name.suffix for name in wanted}
    assert kinds >= {".parquet", ".json", ".png", ".pdf", ".svg", ".csv", ".html", ".zip", ".gz"}
