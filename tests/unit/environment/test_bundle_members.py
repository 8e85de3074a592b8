# SPDX-License-Identifier: Apache-2.0
"""A bundle's part that leads out of its folder is refused, with and without the filter of newer Pythons."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from splitbench.environment import bootstrap

MEMBERS = {
    "a path upwards": ("../out", tarfile.REGTYPE, ""),
    "a path upwards from inside": ("a/../../out", tarfile.REGTYPE, ""),
    "an absolute path": ("/tmp/splitbench-out", tarfile.REGTYPE, ""),
    "a link upwards": ("a/link", tarfile.SYMTYPE, "../../out"),
    "an absolute link": ("link", tarfile.SYMTYPE, "/etc/passwd"),
    "a hard link upwards": ("link", tarfile.LNKTYPE, "../out"),
    "a device": ("device", tarfile.CHRTYPE, ""),
    "a pipe": ("pipe", tarfile.FIFOTYPE, ""),
}


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("name", MEMBERS)
def test_such_a_member_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, by_hand: bool
) -> None:
    if by_hand:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    elif not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python has no filter")
    path, kind, link = MEMBERS[name]
    piece = tmp_path / "part.tar.xz"
    with tarfile.open(piece, "w:xz") as tar:
        fine = tarfile.TarInfo("fine")
        tar.addfile(fine, io.BytesIO(b""))
        member = tarfile.TarInfo(path)
        member.type, member.linkname = kind, link
        tar.addfile(member)
    site = tmp_path / "inside" / "site"
    site.mkdir(parents=True)
    sha256 = hashlib.sha256(piece.read_bytes()).hexdigest()
    with pytest.raises(bootstrap.BundleError, match=r"part\.tar\.xz: .*make the bundle again") as caught:
        bootstrap.unpack([str(piece)], sha256, str(site))
    assert str(caught.value).isprintable()
    assert {entry.name for entry in tmp_path.rglob("*")} <= {"part.tar.xz", "inside", "site", "fine"}
    assert not Path("/tmp/splitbench-out").exists()
