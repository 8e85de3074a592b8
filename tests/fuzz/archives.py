# SPDX-License-Identifier: Apache-2.0
"""Archives: damaged as a zip, and whole as a zip with members that were changed and signed anew."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from splitbench.archive import bag
from splitbench.archive.build import build_archive
from splitbench.archive.compare import compare
from splitbench.archive.place import in_archive
from splitbench.archive.trace import trace
from splitbench.archive.unpack import Limits, unpack
from splitbench.archive.verify import restore, verify
from tests.fakes.finished_results import small_config
from tests.fuzz.bending import bent_bytes, bent_json
from tests.fuzz.judging import answered
from tests.fuzz.results import as_bytes, finished

LIMITS = Limits(files=2000, total_bytes=64 << 20)


@functools.cache
def archive() -> Path:
    """The archive of the small experiment, made once a process."""
    folder, flow = finished()
    path = folder / "tiny.zip"
    build_archive(flow, small_config(), "--configfile experiment.yaml", path, folder=folder, known={})
    return path


@functools.cache
def inside() -> Path:
    """The same, unpacked."""
    folder = archive().parent / "unpacked"
    folder.mkdir()
    unpack(archive(), folder)
    return next(folder.iterdir())


def looked_at(path: Path, out: Path) -> None:
    """All that a stranger's archive is given to."""
    answered(lambda: verify(path, limits=LIMITS), seconds=60)
    answered(lambda: restore(path, out / "restored", LIMITS), seconds=60)

    def traced() -> None:
        with in_archive(path) as place:
            for name in place.names[:400:40]:
                trace(place, name)

    answered(traced)
    answered(lambda: compare(path, archive()), seconds=60)


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@given(st.data())
def zip_bytes(data: st.DataObject) -> None:
    """A zip with damaged bytes: mostly in its directory, where names, sizes and flags are."""
    sound = archive().read_bytes()
    at = sound.index(b"PK\x01\x02")
    worse = (
        sound[:at] + data.draw(bent_bytes(sound[at:]))
        if data.draw(st.booleans())
        else data.draw(bent_bytes(sound))
    )
    with scratch() as out:
        path = out / "worse.zip"
        path.write_bytes(worse)
        looked_at(path, out)


def _members() -> list[str]:
    wanted = (".json", ".gz", ".yaml", ".parquet", ".csv", ".svg", ".html", ".txt")
    return [name for name in bag.payload_files(inside()) if name.endswith(wanted)]


@given(st.data())
def resigned(data: st.DataObject) -> None:
    """A member changed and every manifest made anew: what an editor of results would do."""
    name = data.draw(st.sampled_from(_members()))
    sound = (inside() / name).read_bytes()
    worse = bent_bytes(sound)
    if name.endswith(".json"):
        worse = worse | bent_json(json.loads(sound)).map(as_bytes)
    with scratch() as out:
        copy = out / "bag"
        shutil.copytree(inside(), copy, copy_function=_linked)
        (copy / name).unlink()
        (copy / name).write_bytes(data.draw(worse))
        for tag in (*bag.TAGS, bag.TAG_MANIFEST):
            (copy / tag).unlink()
        bag.write_tags(copy, {"Bag-Software-Agent": "x"})
        bag.pack(copy, inside().name, out / "resigned.zip")
        looked_at(out / "resigned.zip", out)


def _linked(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


TARGETS = {"archive-bytes": zip_bytes, "archive-resigned": resigned}
