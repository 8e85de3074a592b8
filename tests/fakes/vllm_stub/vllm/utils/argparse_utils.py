# SPDX-License-Identifier: Apache-2.0
"""The parser class that vLLM's own modules are given; dashes and underscores mean the same in an option."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse, with `--a_b` read as `--a-b`."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Normalise option names before parsing."""
        words = sys.argv[1:] if args is None else list(args)
        normal = []
        for word in words:
            name, equals, value = word.partition("=")
            normal.append(name.replace("_", "-") + equals + value if name.startswith("--") else word)
        return super().parse_known_args(normal, namespace)
