# SPDX-License-Identifier: Apache-2.0
"""Nothing that an archive says can write outside its folder, make a link, or fill the disk."""

from __future__ import annotations

import gzip
import stat
import zipfile
from pathlib import Path

import pytest

from splitbench.archive.unpack import Limits, gunzip_all, unpack
from splitbench.archive.verify import restore, verify
from splitbench.errors import UserError
from tests.unit.archive.conftest import Finished


def _zip(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes], compress: bool = False) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/x", "a//x", "./x", "a/./x", "C:/x", "a\\..\\x", "a/" + "b" * 300]
)
def test_a_path_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    info = zipfile.ZipInfo("x")
    info.filename = name
    path = _zip(tmp_path / "a.zip", ("fine", b"1"), (info, b"2"))
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="nothing was unpacked"):
        unpack(path, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zip", "out"]
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
def test_links_and_devices_are_refused(tmp_path: Path, kind: int) -> None:
    info = zipfile.ZipInfo("a/link")
    info.create_system = 3
    info.external_attr = (kind | 0o777) << 16
    path = _zip(tmp_path / "a.zip", (info, b"/etc/passwd"))
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="link or a device"):
        unpack(path, tmp_path / "out")


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        path = _zip(tmp_path / "a.zip", ("a", b"1"), ("a", b"2"))
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="twice"):
        unpack(path, tmp_path / "out")


def test_too_many_and_too_large_are_refused(tmp_path: Path) -> None:
    path = _zip(tmp_path / "a.zip", *((f"f{i}", b"x" * 100) for i in range(20)))
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="at most 10"):
        unpack(path, tmp_path / "out", Limits(files=10))
    with pytest.raises(UserError, match="GiB"):
        unpack(path, tmp_path / "out", Limits(total_bytes=1000))
    assert not any((tmp_path / "out").iterdir())


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    path = _zip(tmp_path / "a.zip", ("zeros", bytes(8 << 20)), compress=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="too well"):
        unpack(path, tmp_path / "out")
    (tmp_path / "raw.json.gz").write_bytes(gzip.compress(bytes(8 << 20)))
    with pytest.raises(UserError, match="more than is allowed"):
        gunzip_all(tmp_path, Limits(total_bytes=4 << 20))
    assert not (tmp_path / "raw.json").exists() or (tmp_path / "raw.json").stat().st_size <= 4 << 20


def test_what_is_no_archive_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04 no")
    with pytest.raises(UserError, match="no readable zip"):
        verify(tmp_path / "a.zip")
    with pytest.raises(UserError, match="no splitbench archive"):
        verify(_zip(tmp_path / "b.zip", ("a/b", b"1")))
    with pytest.raises(UserError, match="no such file"):
        verify(tmp_path / "none.zip")


def test_restore_gives_the_tree_with_raw_files_as_they_were(finished: Finished, tmp_path: Path) -> None:
    restore(finished.archive, tmp_path / "back")
    raw = list(finished.folder.rglob("results/tiny/cells/**/*.json"))
    assert raw
    for path in raw:
        assert (tmp_path / "back" / path.relative_to(finished.folder)).read_bytes() == path.read_bytes()
    assert {path.name for path in (tmp_path / "back").rglob("*.gz")} == {"logs.json.gz"}
    with pytest.raises(UserError, match="not empty"):
        restore(finished.archive, tmp_path / "back")
