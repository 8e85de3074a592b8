#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Make envs/workflow.yaml again from workflow.lock (make lock does it). The requirements stand in it: Snakemake copies
# the file to .snakemake/conda before conda reads it, so that `-r workflow.lock` would find nothing; and it names the
# environment by the file's content, so that a new lock makes a new environment.
set -eu
cd "$(dirname "$0")"
{
  cat <<'HEAD'
# SPDX-License-Identifier: Apache-2.0
# For people who run `snakemake --sdm conda`; the same lock installs without conda (make env).
# Made by envs/lock-conda.sh from workflow.lock; do not edit.
channels:
  - conda-forge
dependencies:
  - python >=3.11
  - pip
  - pip:
      - --require-hashes
HEAD
  sed -e ':join' -e '/\\$/{N;s/ *\\\n */ /;b join' -e '}' workflow.lock |
    sed -e '/^ *#/d' -e '/^ *$/d' -e "s/'/''/g" -e "s/^\(.*\)$/      - '\1'/"
} > workflow.yaml.new
mv workflow.yaml.new workflow.yaml
