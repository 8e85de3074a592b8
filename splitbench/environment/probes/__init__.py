# SPDX-License-Identifier: Apache-2.0
"""What a machine and its software are: one small probe per tool or file, run together."""
