# SPDX-License-Identifier: Apache-2.0
"""The command line of the stub: `serve MODEL ...` and `bench serve ...`."""

from __future__ import annotations

import sys


def main() -> int:
    """Dispatch as vLLM's own command line does."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"]:
        from vllm.stub_server import main as serve

        return serve(arguments[1:])
    if arguments[:2] == ["bench", "serve"]:
        from vllm.benchmarks.serve import command_line

        return command_line(arguments[2:])
    if arguments[:1] in (["--version"], ["-v"]):
        from vllm import __version__

        sys.stdout.write(__version__ + "\n")
        return 0
    sys.stderr.write("usage: vllm serve MODEL [options] | vllm bench serve [options]\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
