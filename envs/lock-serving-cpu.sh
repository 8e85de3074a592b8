#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Make envs/serving-cpu.lock again. Usage: envs/lock-serving-cpu.sh [options of `uv pip compile`]
# torch's CPU wheels are a local version (+cpu): say where they are if PyPI is all that uv knows, for instance
#   envs/lock-serving-cpu.sh --find-links WHEEL_FOLDER
#   envs/lock-serving-cpu.sh --index TORCH_CPU_INDEX --index-strategy unsafe-best-match
# Left out (serving-cpu.exclude): torchvision, torchaudio and torchcodec from PyPI do not load beside this torch and
# take vLLM down with them; triton (1 GB) and nixl-cu13 (a second copy of NIXL) are not used on a CPU.
set -eu
cd "$(dirname "$0")"
new=serving-cpu.lock.new
trap 'rm -f "$new"' EXIT
uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
  --no-emit-package torch --excludes serving-cpu.exclude "$@" -o "$new" serving-cpu.in
{
  echo "# Made by envs/lock-serving-cpu.sh from serving-cpu.in; do not edit. Every line is installed without dependencies."
  grep -v '^#' "$new"
  echo "# Without hashes on purpose: a local version has one wheel per Python version and per place that builds it, so the"
  echo "# hash of one of them would refuse the others. The installed files' digest is recorded with the environment."
  grep -o '^torch==[^ ]*' serving-cpu.in
} > "$new.full"
mv "$new.full" serving-cpu.lock
