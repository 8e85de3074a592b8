# SPDX-License-Identifier: Apache-2.0
"""The workflow's code as it goes into an archive: the commit where there is one, and what differs from it."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from splitbench.errors import UserError

# What the workflow runs from; new files in these folders belong to the code though no commit has them yet.
CODE = ("Snakefile", "rules", "scripts", "splitbench", "envs", "profiles", "config", "docs", "pyproject.toml")
_SKIPPED = frozenset({"__pycache__", ".git", ".venv", ".splitbench", ".snakemake", "results", "node_modules"})


@dataclass(frozen=True)
class Code:
    """The code of the workflow.

    Attributes:
        files: content by path below the repository.
        commit: the commit that is checked out; None without git.
        changed: files that are not as in the commit, changed, new or deleted; all of them without git.
    """

    files: dict[str, bytes]
    commit: str | None
    changed: tuple[str, ...]

    @property
    def words(self) -> str:
        """One sentence about where the code comes from."""
        if self.commit is None:
            return "The code is a copy of the files as they lay there; no git said which commit they are."
        if not self.changed:
            return f"The code is commit {self.commit}, without any change."
        listed = ", ".join(self.changed[:20]) + (" and more" if len(self.changed) > 20 else "")
        return f"The code is commit {self.commit} with uncommitted changes in {len(self.changed)} file(s): {listed}."


def code_of(repository: Path) -> Code:
    """The workflow's code: `git archive` of the commit (less what .gitattributes ignores), and what was changed since.

    Raises:
        UserError: git is there but can't give the commit.
    """
    commit = _commit(repository)
    if commit is None:
        files = {str(path): (repository / path).read_bytes() for path in _lying(repository)}
        return Code(files, None, tuple(sorted(files)))
    files = dict(_git_archive(repository, commit))
    changed = _git(repository, "diff", "--name-only", "--no-renames", "-z", "HEAD", "--", ".").split("\0")
    new = _git(repository, "ls-files", "--others", "--exclude-standard", "-z", "--", *CODE).split("\0")
    names = sorted({name for name in (*changed, *new) if name})
    for name in names:
        path = repository / name
        if path.is_file() and not path.is_symlink():
            files[name] = path.read_bytes()
        else:
            files.pop(name, None)
    return Code(files, commit, tuple(names))


def _commit(repository: Path) -> str | None:
    """The checked-out commit, where the repository itself is a git work tree and not a folder inside another's."""
    try:
        top = _git(repository, "rev-parse", "--show-toplevel").strip()
        if not top or Path(top).resolve() != repository.resolve():
            return None
        return _git(repository, "rev-parse", "HEAD").strip()
    except (OSError, UserError):
        return None


def _git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"git {arguments[0]} failed: {done.stderr.strip()}", where=str(repository))
    return done.stdout


def _git_archive(repository: Path, commit: str) -> Iterator[tuple[str, bytes]]:
    done = subprocess.run(
        ["git", "archive", "--format=tar", commit], cwd=repository, capture_output=True, check=False
    )
    if done.returncode != 0:
        raise UserError(f"git archive failed: {done.stderr.decode(errors='replace')}", where=str(repository))
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        for member in tar:
            # Links have no place in an archive that anyone unpacks.
            if member.isfile() and (handle := tar.extractfile(member)) is not None:
                yield member.name, handle.read()


def _lying(repository: Path) -> Iterator[PurePosixPath]:
    for name in (*CODE, "README.md", "LICENSE", "CITATION.cff"):
        start = repository / name
        for path in sorted([start] if start.is_file() else start.rglob("*")):
            relative = path.relative_to(repository)
            if path.is_file() and not path.is_symlink() and not _SKIPPED & set(relative.parts):
                yield PurePosixPath(relative)
