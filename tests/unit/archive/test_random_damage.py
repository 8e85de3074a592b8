# SPDX-License-Identifier: Apache-2.0
"""A seeded slice of the campaign: campaign.py, run by hand, does hundreds."""

from __future__ import annotations

import random

from tests.unit.archive.campaign import flips, forgeries
from tests.unit.archive.conftest import Finished


def test_flipped_bits_anywhere_are_found_and_their_file_named(finished: Finished) -> None:
    assert list(flips(finished.archive, 8, random.Random(20))) == []


def test_forged_numbers_of_report_statistics_and_figure_are_found_and_their_file_named(
    finished: Finished,
) -> None:
    found = dict(forgeries(finished.archive, 3, random.Random(21)))
    assert [wrong for wrong in found.values() if wrong] == [] and len(found) == 3
