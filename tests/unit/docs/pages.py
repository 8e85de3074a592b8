# SPDX-License-Identifier: Apache-2.0
"""The pages that people read, and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)


def pages() -> list[Path]:
    """READMEs, guides and generated pages; not what lies in environments or results."""
    folders = ("", "docs", "config", "results", "benchmarks/proxy", "benchmarks/tables")
    return sorted(path for folder in folders for path in (REPOSITORY / folder).glob("*.md"))


def commands(path: Path) -> list[str]:
    """Commands in a page's `bash` and `console` blocks, comments and continuation lines taken away."""
    found = []
    for block in FENCE.finditer(path.read_text(encoding="utf-8")):
        language, body = block["language"], block["body"].replace("\\\n", " ")
        if language not in ("bash", "console", "sh"):
            continue
        for line in body.splitlines():
            text = line.strip()
            if language == "console":
                if not text.startswith("$ "):
                    continue
                text = text[2:]
            text = re.sub(r"\s+#.*$", "", text).strip()
            if text and not text.startswith("#"):
                found.append(re.sub(r"\s+", " ", text))
    return found


def prose(path: Path) -> str:
    """A page without its code blocks and comments."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
