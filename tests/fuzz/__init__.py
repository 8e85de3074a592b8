# SPDX-License-Identifier: Apache-2.0
"""Bad input of every kind, by seed. `python -m tests.fuzz --examples 5000` is the campaign; `make test` runs a slice.

A target is a test of hypothesis that takes no arguments. It fails on any exception but `UserError`, on a message that
is not one line for each problem, and (in the campaign, by `--limit-s`) on input that keeps it busy.
"""
