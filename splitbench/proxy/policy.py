# SPDX-License-Identifier: Apache-2.0
"""Which engine gets the next request."""

from __future__ import annotations

from collections.abc import Sequence

from splitbench.proxy.engines import Engine


class Rotation:
    """Order of preference among the engines of one role: the first is the choice, the others stand in for it.

    `round-robin` takes turns; `least-loaded` prefers the fewest requests in flight, and takes turns among
    equals.
    """

    def __init__(self, engines: Sequence[Engine], policy: str) -> None:
        self.engines = tuple(engines)
        self._least_loaded = policy == "least-loaded"
        self._turn = 0

    def order(self) -> list[Engine]:
        """All engines, best first; moves the turn on."""
        turn = self._turn
        self._turn = (turn + 1) % len(self.engines)
        order = [*self.engines[turn:], *self.engines[:turn]]
        if self._least_loaded:
            order.sort(key=lambda engine: engine.in_flight)
        return order
