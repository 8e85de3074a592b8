# SPDX-License-Identifier: Apache-2.0
"""The report: what an experiment found, on one self-contained page."""

from __future__ import annotations

from splitbench.report.content import Report, effects
from splitbench.report.page import render, write_report

__all__ = ["Report", "effects", "render", "write_report"]
