# SPDX-License-Identifier: Apache-2.0
"""All targets by name, and one run of one."""

from __future__ import annotations

from typing import Any

import hypothesis

from tests.fuzz import archives, configs, results, texts

TARGETS: dict[str, Any] = {**configs.TARGETS, **results.TARGETS, **texts.TARGETS, **archives.TARGETS}


def run(name: str, *, examples: int, seed: int) -> None:
    """Try a target on so many examples.

    Raises:
        BaseException: what the first fault raised; its notes hold the shortest input that was found.
    """
    settings = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=True,
    )
    hypothesis.seed(seed)(settings(TARGETS[name]))()
