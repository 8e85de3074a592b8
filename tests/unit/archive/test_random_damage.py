# SPDX-License-Identifier: Apache-2.0
"""A seeded slice of the campaign: campaign.py, run by hand, does hundreds."""

from __future__ import annotations

import random

from tests.unit.archive.campaign import FORGERIES, flips, forgeries
from tests.unit.archive.conftest import Finished


def test_flipped_bits_anywhere_are_found_and_their_file_named(finished: Finished) -> None:
    assert list(flips(finished.archive, 12, random.Random(20))) == []


def test_one_forged_number_of_each_kind_is_found_and_its_file_named(finished: Finished) -> None:
    found = dict(forgeries(finished.archive, len(FORGERIES), random.Random(21)))
    assert [wrong for wrong in found.values() if wrong] == [] and len(found) == len(FORGERIES)
