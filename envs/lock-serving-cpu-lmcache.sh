#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Make envs/serving-cpu-lmcache.lock again: serving-cpu.lock and, without dependencies, serving-cpu-lmcache.in.
# Usage: envs/lock-serving-cpu-lmcache.sh [options of `uv pip compile`], after envs/lock-serving-cpu.sh
set -eu
cd "$(dirname "$0")"
new=serving-cpu-lmcache.lock.new
trap 'rm -f "$new" "$new.full"' EXIT
uv pip compile -q --no-deps --python-version 3.11 --generate-hashes --no-header --no-annotate "$@" -o "$new" \
  serving-cpu-lmcache.in
{
  echo "# Made by envs/lock-serving-cpu-lmcache.sh; do not edit. Every line is installed without dependencies."
  grep -v '^#' "$new"
  grep -v '^# Made by' serving-cpu.lock
} > "$new.full"
mv "$new.full" serving-cpu-lmcache.lock
