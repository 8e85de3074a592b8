# SPDX-License-Identifier: Apache-2.0
"""What a killed engine leaves behind is found by what was recorded, and nothing else is touched."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from splitbench.serving.leftovers import (
    choose_runtime,
    make_runtime,
    mapped,
    private_places,
    remove_runtimes,
    remove_segments,
    segments,
)

IDENT = "0123456789abcdef"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def made(state: Path, ident: str, temporary: Path) -> Path:
    """Choose and make, as a session and its supervisor do."""
    folder = choose_runtime(state, ident, temporary)
    make_runtime(state, ident, folder)
    return folder


def test_the_folder_is_private_short_and_found_again_from_the_state_folder(
    state: Path, tmp_path: Path
) -> None:
    folder = made(state, IDENT, tmp_path)
    assert folder == tmp_path / "sb-012345"
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "below").mkdir()
    (folder / "below" / "file").touch()
    remove_runtimes(state)
    assert not folder.exists()
    assert list(state.iterdir()) == []


def test_a_folder_that_is_there_already_is_somebody_elses(state: Path, tmp_path: Path) -> None:
    other = tmp_path / "sb-012345"
    other.mkdir()
    folder = made(state, IDENT, tmp_path)
    assert folder != other
    remove_runtimes(state, IDENT)
    assert other.exists()
    assert not folder.exists()


def test_a_folder_that_came_up_meanwhile_is_not_taken_over(state: Path, tmp_path: Path) -> None:
    folder = choose_runtime(state, IDENT, tmp_path)
    folder.mkdir()
    with pytest.raises(FileExistsError):
        make_runtime(state, IDENT, folder)
    remove_runtimes(state)
    assert folder.exists()
    assert list(state.iterdir()) == []


def test_another_sessions_folder_stays(state: Path, tmp_path: Path) -> None:
    mine, other = made(state, IDENT, tmp_path), made(state, "f" * 16, tmp_path)
    remove_runtimes(state, IDENT)
    assert not mine.exists()
    assert other.exists()


@pytest.mark.parametrize("target", ["elsewhere", "sb-123456/../elsewhere"])
def test_a_link_that_leads_elsewhere_deletes_nothing(state: Path, tmp_path: Path, target: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "sb-123456").mkdir()
    (state / "run-01234567").symlink_to(tmp_path / target)
    remove_runtimes(state)
    assert elsewhere.exists()


def test_a_link_whose_folder_has_gone_is_removed(state: Path, tmp_path: Path) -> None:
    made(state, IDENT, tmp_path).rmdir()
    remove_runtimes(state)
    assert list(state.iterdir()) == []


def test_without_a_folder_for_temporary_files_it_is_in_the_state_folder(state: Path, tmp_path: Path) -> None:
    folder = made(state, IDENT, tmp_path / "missing")
    assert folder.is_dir()
    assert folder.parent == state
    remove_runtimes(state)
    assert list(state.iterdir()) == []


def test_lmcaches_longest_socket_fits() -> None:
    name = f"engine_{'0' * 36}_dp0_service_lookup_lmcache_rpc_port_prefill-00"
    assert len(f"/tmp/sb-012345/{name}") <= 107


def test_compiled_code_stays_where_it_was() -> None:
    folder = Path("/tmp/sb-012345")
    assert private_places(folder, {})["TORCHINDUCTOR_CACHE_DIR"].startswith("/tmp/torchinductor_")
    assert private_places(folder, {"TMPDIR": "/scratch"})["TORCHINDUCTOR_CACHE_DIR"].startswith("/scratch/")
    assert "TORCHINDUCTOR_CACHE_DIR" not in private_places(folder, {"TORCHINDUCTOR_CACHE_DIR": "/kept"})


def test_shared_memory_is_ours_if_one_of_ours_maps_it(tmp_path: Path) -> None:
    for name in ("mapped", "not-mapped"):
        (tmp_path / name).write_bytes(b"\0" * 4096)
    here = segments(tmp_path)
    assert set(here) == {"mapped", "not-mapped"}
    handle = os.open(tmp_path / "mapped", os.O_RDWR)
    view = mmap.mmap(handle, 4096)
    try:
        assert mapped([os.getpid()], here, tmp_path) == {"mapped": here["mapped"]}
        assert mapped([os.getpid()], {"mapped": here["mapped"] + 1}, tmp_path) == {}
    finally:
        view.close()
        os.close(handle)


def test_only_the_recorded_file_is_deleted_not_its_successor(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.touch()
    recorded = segments(tmp_path)
    second.rename(tmp_path / "kept")  # so that its inode is not given again
    second.touch()
    assert remove_segments(recorded, tmp_path) == ["first"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "second"]
