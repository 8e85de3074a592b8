# SPDX-License-Identifier: Apache-2.0
"""Which engines may start together."""

from __future__ import annotations

import pytest

from splitbench.serving.waves import waves


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
    assert waves(devices) == wanted
