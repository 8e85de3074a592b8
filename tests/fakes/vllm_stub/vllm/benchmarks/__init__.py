# SPDX-License-Identifier: Apache-2.0
"""Part of the stub of vLLM for tests."""
