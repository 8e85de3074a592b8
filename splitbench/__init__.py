# SPDX-License-Identifier: Apache-2.0
"""splitbench: does prefill-decode disaggregation pay off for this traffic, SLO and accelerator budget?"""

__version__ = "0.1.0"
