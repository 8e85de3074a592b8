# SPDX-License-Identifier: Apache-2.0
"""A stub of vLLM for tests: the same commands, endpoints and result files, no model and no arithmetic.

It is put in front of the module search path of a fake serving environment. Only the standard library is
used, and nothing heavy is imported, so that a server or a client starts in a tenth of a second. Timing and
misbehaviour are set in `behaviour`.
"""

__version__ = "0.32.0+stub"
