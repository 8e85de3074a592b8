# SPDX-License-Identifier: Apache-2.0
"""Which engines may start together. Imports nothing, since the supervisor needs it."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def waves(devices: Sequence[Collection[int]]) -> list[list[int]]:
    """Engines in groups that may start together: those that share a device start one after the other.

    An engine measures the free memory of its device while it starts; a neighbour that grows meanwhile would spoil that.

    Args:
        devices: what each engine occupies, in the plan's order.

    Returns:
        places in that order, per group.
    """
    found: list[list[int]] = []
    taken: list[set[int]] = []
    for index, occupied in enumerate(devices):
        # Behind every group that has a neighbour of it.
        place = max((number + 1 for number, used in enumerate(taken) if used & set(occupied)), default=0)
        if place == len(found):
            found.append([])
            taken.append(set())
        found[place].append(index)
        taken[place] |= set(occupied)
    return found
