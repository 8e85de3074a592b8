# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from splitbench.experiment.cli_config import schema_text


def test_the_schema_that_editors_use_is_the_models_own() -> None:
    kept = Path(__file__).parents[3] / "config" / "schema.json"
    assert kept.read_text(encoding="utf-8") == schema_text(), "splitbench config schema > config/schema.json"
