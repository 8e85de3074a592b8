# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import settings

# A busy machine is no failure.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
