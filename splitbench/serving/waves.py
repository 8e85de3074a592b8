# SPDX-License-Identifier: Apache-2.0
"""Which engines may start together. Imports nothing, since the supervisor needs it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

POOL_IN_BYTES = "--kv-cache-memory-bytes"


def waves(engines: Sequence[tuple[Collection[Hashable], Sequence[str]]]) -> list[list[int]]:
    """Engines in groups that may start together: those that share a device start one after the other.

    An engine measures the free memory of its device while it starts; a neighbour that grows meanwhile would spoil
    that. Neighbours whose KV pools are all stated in bytes measure nothing, and start together.

    Args:
        engines: what each engine occupies and its arguments, in the plan's order.

    Returns:
        places in that order, per group.
    """
    found: list[list[int]] = []
    for index, (occupied, argv) in enumerate(engines):

        def disturbs(
            other: int, mine: Collection[Hashable] = occupied, measures: bool = POOL_IN_BYTES not in argv
        ) -> bool:
            devices, arguments = engines[other]
            return bool({*devices} & {*mine}) and (measures or POOL_IN_BYTES not in arguments)

        # Behind every group that has a neighbour of it.
        place = max(
            (number + 1 for number, group in enumerate(found) if any(disturbs(other) for other in group)),
            default=0,
        )
        if place == len(found):
            found.append([])
        found[place].append(index)
    return found
