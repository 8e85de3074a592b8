# SPDX-License-Identifier: Apache-2.0
"""A serving environment whose vllm is the stub: for tests that run the workflow as a user does.

Its interpreter is the one thing that a workflow needs to know. How its engines behave can be set in
`<folder>/vllm_stub.json` (see the stub's `behaviour`), without a trace in plans or environments.
"""

from __future__ import annotations

import json
import sys
import venv
from pathlib import Path
from typing import Any

STUB = Path(__file__).parent / "vllm_stub"


def make_environment(folder: Path, **behaviour: Any) -> Path:
    """Make the environment (a tenth of a second, no download); returns the path of its interpreter."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "vllm_stub.pth").write_text(f"{STUB}\n")
    set_behaviour(folder, **behaviour)
    return folder / "bin" / "python"


def set_behaviour(folder: Path, **behaviour: Any) -> None:
    """Set how all engines of the environment that are started from now on behave."""
    (folder / "vllm_stub.json").write_text(json.dumps({"all": behaviour}))
