# SPDX-License-Identifier: Apache-2.0
"""The one exception that users see: a single line that names the file, the key and the mend."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager


def shown(text: str) -> str:
    """Text fit for a terminal and a log: white space folded, and no character that moves a cursor or hides others."""
    folded = " ".join(text.split())
    if folded.isprintable():
        return folded
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in folded)


class UserError(Exception):
    """Something the user can mend; printed as one line, exit code 1, never with a traceback.

    Args:
        message: what is wrong, in one line (newlines are folded, control characters escaped, in all three).
        where: the file and, after a colon, the key or line; None where there is none.
        mend: what to do about it, as an imperative; None only where the message says it already.
    """

    def __init__(self, message: str, *, where: str | None = None, mend: str | None = None) -> None:
        self.message = shown(message)
        # A path keeps its double spaces.
        self.where = where if where is None or where.isprintable() else shown(where)
        self.mend = shown(mend) if mend else mend
        text = self.message if self.where is None else f"{self.where}: {self.message}"
        if self.mend:
            text = f"{text}; {self.mend}"
        super().__init__(text)


class DamagedError(UserError, ValueError):
    """A file that this workflow wrote does not hold any more what it held."""


# What code that trusts a file's shape raises where the file has another one.
OF_SHAPE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    EOFError,
    zlib.error,
)


@contextmanager
def damage(where: str, mend: str) -> Iterator[None]:
    """Say of what fails in the block, because a file has another shape than it was written with, that it is damaged.

    The error's cause is kept: rules write it to their log.

    Args:
        where: the files that the block reads.
        mend: how they are made again.

    Raises:
        DamagedError: something in the block failed so.
    """
    try:
        yield
    except UserError:
        raise
    except (*OF_SHAPE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's, not the file's
        what = f"{type(error).__name__}: {str(error)[:300]}"
        raise DamagedError(f"is damaged or of another version ({what})", where=where, mend=mend) from error


PARTS = ("parts/ and tables/ of the results", "delete both folders, and they are made again from the cells")
"""Where and mend of `damage` for whoever reads the tables."""
ARCHIVE = ("the archive or the results", "run `splitbench verify` on it, or copy it again")
"""The same for whoever reads an archive."""
