#!/usr/bin/env bash
# Layout 2x-agg-tp4 of experiment sakura-h100: replicas, 8 GPUs.
# Brings the layout up at http://127.0.0.1:17100, as `splitbench up 2x-agg-tp4` does, and ends it on Ctrl-C.
set -euo pipefail

# Places on this machine; set them in the environment where they are others.
REPOSITORY="${REPOSITORY:-$PWD}"
SERVING_PYTHON="${SERVING_PYTHON:-$REPOSITORY/.splitbench/envs/cuda/bin/python}"
WORKFLOW_PYTHON="${WORKFLOW_PYTHON:-$REPOSITORY/.venv/bin/python}"
MODEL="${MODEL:-openai/gpt-oss-120b}"
# Logs, and files that engines read.
SESSION="${SESSION:-$(mktemp -d)}"
mkdir -p "$SESSION"; SESSION="$(cd "$SESSION" && pwd)"

# What an engine does must follow from this script, not from the shell that happens to start it.
for name in $(compgen -e); do
  case "$name" in
    VLLM_*|LMCACHE_*|UCX_*|NIXL_*|OMP_*|KMP_*|GOMP_*|PYTHONPATH|PYTHONHASHSEED) unset "$name" ;;
  esac
done
PATH="$(dirname "$SERVING_PYTHON"):$PATH"

# -- engine-0: aggregated, GPU 0, 1, 2, 3 --
engine_0=(
  env
  # these GPUs and no others (under MPS, counted within those of its daemon)
  CUDA_VISIBLE_DEVICES=0,1,2,3
  # send no usage statistics
  DO_NOT_TRACK=1
  # send no usage statistics
  VLLM_NO_USAGE_STATS=1
  # allows POST /reset_prefix_cache between cells, and GET /server_info
  VLLM_SERVER_DEV_MODE=1
  "$SERVING_PYTHON" -m vllm.entrypoints.cli.main serve "$MODEL"
  # the name that requests carry, whatever folder the weights are in
  --served-model-name gpt-oss-120b
  # on loopback only: nobody else's requests, and no open port
  --host 127.0.0.1
  # where this engine serves HTTP
  --port 17101
  # every layer is split over so many ranks
  --tensor-parallel-size 4
  # whether the KV of earlier prompts is kept for later ones (from the config)
  --no-enable-prefix-caching
)

# -- engine-1: aggregated, GPU 4, 5, 6, 7 --
engine_1=(
  env
  # these GPUs and no others (under MPS, counted within those of its daemon)
  CUDA_VISIBLE_DEVICES=4,5,6,7
  # send no usage statistics
  DO_NOT_TRACK=1
  # send no usage statistics
  VLLM_NO_USAGE_STATS=1
  # allows POST /reset_prefix_cache between cells, and GET /server_info
  VLLM_SERVER_DEV_MODE=1
  "$SERVING_PYTHON" -m vllm.entrypoints.cli.main serve "$MODEL"
  # the name that requests carry, whatever folder the weights are in
  --served-model-name gpt-oss-120b
  # on loopback only: nobody else's requests, and no open port
  --host 127.0.0.1
  # where this engine serves HTTP
  --port 17102
  # every layer is split over so many ranks
  --tensor-parallel-size 4
  # whether the KV of earlier prompts is kept for later ones (from the config)
  --no-enable-prefix-caching
)

# -- the front door --
proxy=(
  env
  # finds the splitbench package
  PYTHONPATH="$REPOSITORY"
  "$WORKFLOW_PYTHON" -m splitbench.proxy
  # how KV moves, and so what the proxy says to the engines
  --mode round-robin
  # on loopback only
  --host 127.0.0.1
  # where clients send their requests: the layout's front door
  --port 17100
  # hosts of the decode engines (or replicas), in their order
  --decoder-host 127.0.0.1,127.0.0.1
  # HTTP ports of the decode engines (or replicas), in the same order
  --decoder-port 17101,17102
  # how many these are
  --num-decoders 2
)

# -- run --
pids=()
stop() {
  trap - EXIT INT TERM
  # each has a process group of its own: nothing is left behind, and nobody else is hit
  for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  for _ in $(seq 20); do [ -n "$(jobs -pr)" ] || break; sleep 1; done
  for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}
trap stop EXIT INT TERM
start() {  # NAME COMMAND...: in the session's folder, with a log of its own
  local name="$1"; shift
  (cd "$SESSION" && exec setsid "$@" > "$SESSION/$name.log" 2>&1 < /dev/null) &
  pids+=("$!")
  echo "$name: pid $!, log $SESSION/$name.log"
}
healthy() {  # URL SECONDS
  for _ in $(seq "$2"); do
    curl -sf -o /dev/null "$1" && return
    [ "$(jobs -pr | wc -l)" -eq "${#pids[@]}" ] || { echo "a process has ended: $SESSION" >&2; exit 1; }
    sleep 1
  done
  echo "$1 was not healthy within $2 s" >&2; exit 1
}

start engine-0 "${engine_0[@]}"
start engine-1 "${engine_1[@]}"
healthy http://127.0.0.1:17101/health 1800
healthy http://127.0.0.1:17102/health 1800
start proxy "${proxy[@]}"
healthy http://127.0.0.1:17100/health 60

# A first completion through the front door.
curl -sf http://127.0.0.1:17100/v1/completions -H 'Content-Type: application/json' -d '{"model": "gpt-oss-120b", "prompt": "Hello", "max_tokens": 8}'
echo; echo "up at http://127.0.0.1:17100; Ctrl-C ends it"
wait
