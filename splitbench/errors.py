# SPDX-License-Identifier: Apache-2.0
"""The one exception that users see: a single line that names the file, the key and the mend."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend; printed as one line, exit code 1, never with a traceback.

    Args:
        message: what is wrong, in one line (newlines are folded).
        where: the file and, after a colon, the key or line; None where there is none.
        mend: what to do about it, as an imperative; None only where the message says it already.
    """

    def __init__(self, message: str, *, where: str | None = None, mend: str | None = None) -> None:
        self.message = " ".join(message.split())
        self.where = where
        self.mend = None if mend is None else " ".join(mend.split())
        self.mend = mend
        text = self.message if where is None else f"{where}: {self.message}"
        if self.mend:
            text = f"{text}; {self.mend}"
        super().__init__(text)
