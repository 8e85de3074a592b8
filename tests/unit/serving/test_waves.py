# SPDX-License-Identifier: Apache-2.0
"""Which engines may start together."""

from __future__ import annotations

import pytest

from splitbench.serving.waves import POOL_IN_BYTES, waves


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        ([[0], [1], [2]], [[0, 1, 2]]),
        ([[0], [0], [0]], [[0], [1], [2]]),
        ([[0, 1], [2], [1, 2], [3]], [[0, 1, 3], [2]]),
        ([[0], [0], [1], [1]], [[0, 2], [1, 3]]),
    ],
)
def test_neighbours_on_a_device_wait_for_each_other(
    devices: list[list[int]], wanted: list[list[int]]
) -> None:
    assert waves([(occupied, []) for occupied in devices]) == wanted


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        ([True, True, True], [[0, 1, 2]]),
        ([True, True, False], [[0, 1], [2]]),
        ([False, True, True], [[0], [1, 2]]),
    ],
)
def test_neighbours_that_measure_nothing_start_together(stated: list[bool], wanted: list[list[int]]) -> None:
    arguments = [[POOL_IN_BYTES, "1073741824"] if in_bytes else [] for in_bytes in stated]
    assert waves([([0], argv) for argv in arguments]) == wanted
