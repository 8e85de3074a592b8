#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Make the CUDA locks again. Usage: envs/lock-serving-cuda.sh [options of `uv pip compile`]
# Left out (serving-cuda.exclude): NIXL for the other CUDA. `nixl` asks for both of its builds, each with a UCX of its own, and
# two UCX in one process crash or hang it (ai-dynamo/nixl issue 1668).
set -eu
cd "$(dirname "$0")"
new=serving-cuda.lock.new
trap 'rm -f "$new" "$new.full"' EXIT
lock() {
  name=$1
  shift
  uv pip compile -q --python-platform x86_64-manylinux_2_28 --python-version 3.12 --generate-hashes --no-header \
    --no-annotate "$@" -o "$new" "$name.in"
  {
    echo "# Made by envs/lock-serving-cuda.sh from $name.in; do not edit. Every line is installed without dependencies."
    echo "# python: 3.12"
    cat "$new"
  } > "$new.full"
  mv "$new.full" "$name.lock"
  rm -f "$new"
}
lock serving-cuda-lmcache-0.3.10 --exclude-newer 2025-11-29 "$@"
lock serving-cuda --excludes serving-cuda.exclude "$@"
