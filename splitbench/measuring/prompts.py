# SPDX-License-Identifier: Apache-2.0
"""Datasets that are files: that they hold what the config states, and prompts put together from lines of text."""

from __future__ import annotations

import json
import random
from pathlib import Path

from splitbench.errors import UserError
from splitbench.files import sha256_file, write_text

TOKENS_PER_WORD = 1.35
"""Of English verse with a modern tokenizer, about; lengths of such prompts are only near what is asked."""


def check_file(path: Path, sha256: str, where: str) -> None:
    """Make sure that a dataset is the one that results are keyed by.

    Raises:
        UserError: it is not there, or holds something else.
    """
    try:
        found = sha256_file(path)
    except OSError as error:
        raise UserError(
            f"the dataset can't be read: {error.strerror}",
            where=f"{where}.path: {path}",
            mend="put the file there",
        ) from None
    if found != sha256:
        raise UserError(
            f"the dataset {path} has another sha256 than the config states: {found}",
            where=f"{where}.sha256",
            mend="state that one if the file is the right one",
        )


def write_prompts_of_lines(
    lines: Path, destination: Path, *, seed: int, count: int, input_tokens: int, output_tokens: int
) -> None:
    """Write JSON lines with prompts that are put together from the lines of a text in random order.

    Args:
        lines: text file, such as sonnets.
        destination: gets a `prompt` and `output_tokens` a line.
        seed: of the choice of lines.
        count: prompts.
        input_tokens: of each, about.
        output_tokens: of each answer.

    Raises:
        UserError: the text is empty.
    """
    text = [line.strip() for line in lines.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not text:
        raise UserError("holds no line of text", where=str(lines))
    chosen = random.Random(seed)
    words_wanted = max(1, round(input_tokens / TOKENS_PER_WORD))
    rows = []
    for _ in range(count):
        words = 0
        prompt: list[str] = []
        while words < words_wanted:
            line = chosen.choice(text)
            prompt.append(line)
            words += len(line.split())
        rows.append(json.dumps({"prompt": "\n".join(prompt), "output_tokens": output_tokens}))
    write_text(destination, "\n".join(rows) + "\n")
