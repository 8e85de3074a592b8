#!/usr/bin/env bash
# Layout pd-tp4 of experiment sakura-h100: pd, 8 GPUs.
# Brings the layout up at http://127.0.0.1:17100, as `splitbench up pd-tp4` does, and ends it on Ctrl-C.
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

# decode-0.lmcache.yaml
#   enable_pd: prefill-decode mode
#   local_cpu: no second copy of KV in CPU memory
#   max_local_cpu_size: and none reserved
#   nixl_backends: NIXL moves KV by UCX (NVLink, shared memory, or what else there is)
#   pd_buffer_device: transfer buffers are in GPU memory (cuda) or in main memory (cpu)
#   pd_buffer_size: bytes of transfer buffer per rank
#   pd_peer_alloc_port: senders ask for memory here; one port per rank, each takes the one of its number
#   pd_peer_host: where senders reach this decoder
#   pd_peer_init_port: NIXL metadata is exchanged here; one port per rank, each takes the one of its number
#   pd_role: prefill sends, decode receives
#   save_decode_cache: KV of generated tokens is not kept
#   transfer_channel: KV moves by NIXL
cat > "$SESSION"/decode-0.lmcache.yaml <<'END_OF_FILE'
enable_pd: true
local_cpu: false
max_local_cpu_size: 0
nixl_backends:
- UCX
pd_buffer_device: cuda
pd_buffer_size: 2147483648
pd_peer_alloc_port:
- 17108
- 17109
- 17110
- 17111
pd_peer_host: 127.0.0.1
pd_peer_init_port:
- 17104
- 17105
- 17106
- 17107
pd_role: receiver
save_decode_cache: false
transfer_channel: nixl
END_OF_FILE

# prefill-0.lmcache.yaml
#   enable_pd: prefill-decode mode
#   local_cpu: no second copy of KV in CPU memory
#   max_local_cpu_size: and none reserved
#   nixl_backends: NIXL moves KV by UCX (NVLink, shared memory, or what else there is)
#   pd_buffer_device: transfer buffers are in GPU memory (cuda) or in main memory (cpu)
#   pd_buffer_size: bytes of transfer buffer per rank
#   pd_proxy_host: the proxy is told here that KV has been sent
#   pd_proxy_port: the proxy's --proxy-port
#   pd_role: prefill sends, decode receives
#   save_decode_cache: KV of generated tokens is not kept
#   transfer_channel: KV moves by NIXL
cat > "$SESSION"/prefill-0.lmcache.yaml <<'END_OF_FILE'
enable_pd: true
local_cpu: false
max_local_cpu_size: 0
nixl_backends:
- UCX
pd_buffer_device: cuda
pd_buffer_size: 2147483648
pd_proxy_host: 127.0.0.1
pd_proxy_port: 17101
pd_role: sender
save_decode_cache: false
transfer_channel: nixl
END_OF_FILE

# -- prefill-0: prefill, GPU 0, 1, 2, 3 --
prefill_0=(
  env
  # these GPUs and no others (under MPS, counted within those of its daemon)
  CUDA_VISIBLE_DEVICES=0,1,2,3
  # send no usage statistics
  DO_NOT_TRACK=1
  # this engine's side of the KV transfer, see the file above
  LMCACHE_CONFIG_FILE="$SESSION"/prefill-0.lmcache.yaml
  # send no usage statistics
  LMCACHE_TRACK_USAGE=false
  # prefill and decode must name KV chunks alike
  PYTHONHASHSEED=0
  # UCX says which transports each connection takes
  UCX_LOG_LEVEL=info
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
  # how KV cache moves between prefill and decode
  #   kv_connector: the connector
  #   kv_connector_extra_config: settings of the connector's own
  #     discard_partial_chunks: false: the last, unfinished chunk moves too
  #     lmcache_rpc_port: a name of its own for each engine's internal socket
  #   kv_role: this engine sends (kv_producer), receives (kv_consumer), or both
  --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_connector_extra_config":{"discard_partial_chunks":false,"lmcache_rpc_port":"prefill-0"},"kv_role":"kv_producer"}'
)

# -- decode-0: decode, GPU 4, 5, 6, 7 --
decode_0=(
  env
  # these GPUs and no others (under MPS, counted within those of its daemon)
  CUDA_VISIBLE_DEVICES=4,5,6,7
  # send no usage statistics
  DO_NOT_TRACK=1
  # this engine's side of the KV transfer, see the file above
  LMCACHE_CONFIG_FILE="$SESSION"/decode-0.lmcache.yaml
  # send no usage statistics
  LMCACHE_TRACK_USAGE=false
  # prefill and decode must name KV chunks alike
  PYTHONHASHSEED=0
  # UCX says which transports each connection takes
  UCX_LOG_LEVEL=info
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
  --port 17103
  # every layer is split over so many ranks
  --tensor-parallel-size 4
  # whether the KV of earlier prompts is kept for later ones (from the config)
  --no-enable-prefix-caching
  # how KV cache moves between prefill and decode
  #   kv_connector: the connector
  #   kv_connector_extra_config: settings of the connector's own
  #     discard_partial_chunks: false: the last, unfinished chunk moves too
  #     lmcache_rpc_port: a name of its own for each engine's internal socket
  #     skip_last_n_tokens: the decoder computes the last prompt token itself, which gives it the next one
  #   kv_role: this engine sends (kv_producer), receives (kv_consumer), or both
  --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_connector_extra_config":{"discard_partial_chunks":false,"lmcache_rpc_port":"decode-0","skip_last_n_tokens":1},"kv_role":"kv_consumer"}'
)

# -- the front door --
proxy=(
  env
  # finds the splitbench package
  PYTHONPATH="$REPOSITORY"
  "$WORKFLOW_PYTHON" -m splitbench.proxy
  # how KV moves, and so what the proxy says to the engines
  --mode lmcache
  # on loopback only
  --host 127.0.0.1
  # where clients send their requests: the layout's front door
  --port 17100
  # hosts of the prefill engines, in their order
  --prefiller-host 127.0.0.1
  # HTTP ports of the prefill engines, in the same order
  --prefiller-port 17102
  # how many these are
  --num-prefillers 1
  # hosts of the decode engines (or replicas), in their order
  --decoder-host 127.0.0.1
  # HTTP ports of the decode engines (or replicas), in the same order
  --decoder-port 17103
  # how many these are
  --num-decoders 1
  # NIXL metadata is exchanged here, once per pair: one port per decoder rank, rank 0 first
  --decoder-init-port 17104,17105,17106,17107
  # senders ask for memory here: one port per decoder rank, rank 0 first
  --decoder-alloc-port 17108,17109,17110,17111
  # prefill engines report here that KV has been sent
  --proxy-host 127.0.0.1
  # port of these reports (ZMQ), the pd_proxy_port of the senders' files
  --proxy-port 17101
  # who makes the first token
  --first-token prefiller
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

start prefill-0 "${prefill_0[@]}"
start decode-0 "${decode_0[@]}"
healthy http://127.0.0.1:17102/health 1800
healthy http://127.0.0.1:17103/health 1800
start proxy "${proxy[@]}"
healthy http://127.0.0.1:17100/health 60

# A first completion through the front door.
curl -sf http://127.0.0.1:17100/v1/completions -H 'Content-Type: application/json' -d '{"model": "gpt-oss-120b", "prompt": "Hello", "max_tokens": 8}'
echo; echo "up at http://127.0.0.1:17100; Ctrl-C ends it"
wait
