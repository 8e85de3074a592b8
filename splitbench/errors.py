# SPDX-License-Identifier: Apache-2.0
"""The one exception that users see: a single line that names the file, the key and the mend."""

from __future__ import annotations


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
