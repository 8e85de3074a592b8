# SPDX-License-Identifier: Apache-2.0
"""Beyond one machine: the workflow in an allocation of SLURM, and what a job of SLURM has to know of its node."""
