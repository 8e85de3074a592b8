# SPDX-License-Identifier: Apache-2.0
"""`python -m splitbench.proxy`: run the proxy until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import sys
from collections.abc import Sequence

import uvloop

from splitbench.errors import UserError
from splitbench.proxy.options import Options, parse_options
from splitbench.proxy.server import Proxy


async def serve(options: Options) -> None:
    """Serve until told to stop.

    Raises:
        UserError: see `Proxy.start`.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    proxy = Proxy(options)
    await proxy.start()
    # What exists now stays. A full collection would stop every stream for as long as it looks at it.
    gc.collect()
    gc.freeze()
    try:
        await stop.wait()
    finally:
        await proxy.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proxy; 1 for what the user can mend."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        options = parse_options(argv)
        allow_many_connections()
        uvloop.run(serve(options))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def allow_many_connections() -> None:
    """Raise the soft limit of open files to the hard one: every stream takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
