# SPDX-License-Identifier: Apache-2.0
"""What a rule's script says when files are taken from under it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from splitbench.errors import UserError
from splitbench.files import write_text
from splitbench.workflow import script


def said(capfd: pytest.CaptureFixture[str], log: Path, error: Exception) -> str:
    """What a person sees of an error in a script."""
    with pytest.raises(SystemExit) as ended, script(str(log)):
        raise error
    assert ended.value.code == 1
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "can't be written (No space left on device); make room, then run again"),
        (errno.EROFS, "can't be written (Read-only file system); mend the rights, then run again"),
        (errno.ENOENT, "has gone while the workflow ran (No such file or directory)"),
        (errno.EIO, "can't be read or written (Input/output error); look at the disk"),
    ],
)
def test_one_line_names_the_file_and_the_mend(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int, words: str
) -> None:
    log = tmp_path / "rule.log"
    text = said(capfd, log, OSError(number, os.strerror(number), "results/a.json"))
    assert text.startswith(f"splitbench: error: results/a.json: {words}")
    assert len(text.splitlines()) == 1
    assert "Traceback" in log.read_text()  # for whoever wants to know more


def test_an_error_of_ours_stays_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file"), script(str(tmp_path / "rule.log")):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def test_a_log_that_can_not_be_written_hides_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    text = said(capfd, tmp_path / "file" / "rule.log", UserError("a port is taken", mend="choose another"))
    assert text == "splitbench: error: a port is taken; choose another\n"


def test_a_full_disk_says_which_file(tmp_path: Path) -> None:

    # The system does not name the file where a write fails, only where an opening does.
    def full(*given: object, **more: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError) as caught:
        patch.setattr(Path, "write_text", full)
        write_text(tmp_path / "result.json", "x")
    assert caught.value.filename == str(tmp_path / "result.json")
    assert list(tmp_path.iterdir()) == []
