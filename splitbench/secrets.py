# SPDX-License-Identifier: Apache-2.0
"""Which names of variables promise a secret: configs may not set them, records of a machine leave them out."""

from __future__ import annotations

import re

SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL|AUTH)", re.IGNORECASE)
