# SPDX-License-Identifier: Apache-2.0
"""Invented conversations in ShareGPT's form: `python -m splitbench.measuring.conversations FILE`.

For trying an open loop without anybody's data. Words are those of the synthetic model's tokenizer, one token each, so
that lengths are known; lengths are spread as chats' are, most short and a few long.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from splitbench.files import sha256_file, write_text

# Of the normal distribution of the logarithm of lengths, in tokens: medians of about 110 in and 30 out.
_PROMPT = (4.7, 0.9)
_ANSWER = (3.4, 0.6)
# What the client leaves out (below 4 tokens), and what the demo's model still holds (1,024 in all).
_SHORTEST = 8
_LONGEST_PROMPT = 700
_LONGEST_ANSWER = 96
_WORDS = 32_000


def conversations(count: int, seed: int) -> list[dict[str, object]]:
    """So many conversations of one turn each; the same for the same seed."""
    draw = random.Random(f"conversations/{seed}")

    def text(shape: tuple[float, float], longest: int) -> str:
        length = min(longest, max(_SHORTEST, round(draw.lognormvariate(*shape))))
        return " ".join(f"w{draw.randrange(_WORDS)}" for _ in range(length))

    return [
        {
            "id": f"made-{number}",
            "conversations": [
                {"from": "human", "value": text(_PROMPT, _LONGEST_PROMPT)},
                {"from": "gpt", "value": text(_ANSWER, _LONGEST_ANSWER)},
            ],
        }
        for number in range(count)
    ]


def main(argv: list[str] | None = None) -> int:
    """Write the file and say what the config has to state."""
    parser = argparse.ArgumentParser(prog="python -m splitbench.measuring.conversations", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    made = conversations(arguments.count, arguments.seed)
    write_text(arguments.file, json.dumps(made, separators=(",", ":")) + "\n")
    sys.stdout.write(f"path: {arguments.file}, sha256: {sha256_file(arguments.file)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
