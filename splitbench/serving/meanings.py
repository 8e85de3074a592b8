# SPDX-License-Identifier: Apache-2.0
"""What each flag, environment variable and file key of a launch plan is for, in a line: comments of the plan scripts.

Flags and variables that a plan sets by itself must all be here; those that a config adds may be.
"""

from __future__ import annotations

from collections.abc import Mapping

ENGINE_FLAGS: Mapping[str, str] = {
    # Set by every plan.
    "served-model-name": "the name that requests carry, whatever folder the weights are in",
    "host": "on loopback only: nobody else's requests, and no open port",
    "port": "where this engine serves HTTP",
    "revision": "this commit of the hub repository, not whatever is newest",
    "tensor-parallel-size": "every layer is split over so many ranks",
    "pipeline-parallel-size": "layers are dealt out to so many stages",
    "data-parallel-size": "so many copies of the model behind one server",
    "gpu-memory-utilization": "share of the GPU's memory for weights, activations and KV pool together",
    "kv-cache-memory-bytes": "size of the KV pool in bytes per GPU, instead of what a memory share leaves",
    "kv-transfer-config": "how KV cache moves between prefill and decode",
    # Set by a plan for an engine on another node.
    "node": "started there as a step of SLURM, by a process here that stands for it",
    "ports": "what must be free there before, and is again after",
    "gpus": "GPUs there, whose memory must come back",
    "cores": "confined to these cores there",
    # Known flags of configs.
    "async-scheduling": "schedule the next step while one runs",
    "attention-backend": "this attention backend, not vLLM's own choice",
    "block-size": "tokens in a block of KV cache",
    "compilation-config": "how the model is compiled",
    "cudagraph-capture-sizes": "batch sizes for which CUDA graphs are captured; fewer start faster",
    "disable-hybrid-kv-cache-manager": "one KV layout for all layers, as PD connectors need it",
    "dtype": "type of weights and activations",
    "enable-chunked-prefill": "long prompts are computed in pieces, between decode steps",
    "enable-prefix-caching": "whether the KV of earlier prompts is kept for later ones",
    "enforce-eager": "no compilation and no CUDA graphs",
    "kv-cache-dtype": "type of the KV cache",
    "load-format": "how weights are read; dummy makes them up",
    "max-model-len": "longest request in tokens, in and out; without it the model's own limit counts",
    "max-num-batched-tokens": "token budget of one step; a bound on what prefill may put before decode",
    "max-num-seqs": "requests in one step at most",
    "quantization": "quantisation of the weights",
    "seed": "seed of sampling",
    "swap-space": "CPU memory for requests that were set aside",
}

PROXY_FLAGS: Mapping[str, str] = {
    "mode": "how KV moves, and so what the proxy says to the engines",
    "host": "on loopback only",
    "port": "where clients send their requests: the layout's front door",
    "prefiller-host": "hosts of the prefill engines, in their order",
    "prefiller-port": "HTTP ports of the prefill engines, in the same order",
    "num-prefillers": "how many these are",
    "decoder-host": "hosts of the decode engines (or replicas), in their order",
    "decoder-port": "HTTP ports of the decode engines (or replicas), in the same order",
    "num-decoders": "how many these are",
    "decoder-init-port": "NIXL metadata is exchanged here, once per pair: one port per decoder rank, rank 0 first",
    "decoder-alloc-port": "senders ask for memory here: one port per decoder rank, rank 0 first",
    "proxy-host": "prefill engines report here that KV has been sent",
    "proxy-port": "port of these reports (ZMQ), the pd_proxy_port of the senders' files",
    "first-token": "who makes the first token",
    "trace-file": "one JSON line per request: when each stage was reached",
    # vllm-router
    "vllm-pd-disaggregation": "prefill and decode apart",
    "kv-connector": "how KV moves",
    "prefill": "a prefill engine",
    "decode": "a decode engine",
    "worker-urls": "the replicas",
    "prometheus-host": "the router's own metrics, on loopback",
    "prometheus-port": "port of these metrics",
    "policy": "engines take turns",
    "max-concurrent-requests": "refuse nothing: the client alone limits what is in flight",
    "log-level": "warnings only",
}

SERVICE_FLAGS: Mapping[str, str] = {
    "l1-size-gb": "memory for KV chunks, in GiB",
    "chunk-size": "tokens in a chunk: only whole chunks move, a rest is computed again",
    "eviction-policy": "what goes when memory is full: the chunk that was not used for longest",
    "host": "on loopback only",
    "port": "where engines connect (ZMQ)",
    "http-host": "its HTTP side on loopback only",
    "http-port": "health over HTTP",
    "prometheus-port": "its own metrics",
    "supported-transfer-mode": "without it engines hang at their start",
    "f": "stay in the foreground, so that it ends with the session",
}

ENVIRONMENT: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "these GPUs and no others (under MPS, counted within those of its daemon)",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "the share of the GPU's compute units that this engine may use",
    "CUDA_MPS_PIPE_DIRECTORY": "the MPS daemon of this session, none that others may run",
    "CUDA_MPS_LOG_DIRECTORY": "logs of the MPS daemon",
    "DO_NOT_TRACK": "send no usage statistics",
    "GOMP_CPU_AFFINITY": "threads are pinned to these cores; loose ones would wander onto a neighbour's",
    "HF_HUB_OFFLINE": "the model is a folder: ask no hub",
    "LMCACHE_CONFIG_FILE": "this engine's side of the KV transfer, see the file above",
    "LMCACHE_TRACK_USAGE": "send no usage statistics",
    "OMP_NUM_THREADS": "a thread per core",
    "OMP_WAIT_POLICY": "threads that wait give their core away",
    "PYTHONHASHSEED": "prefill and decode must name KV chunks alike",
    "PYTHONPATH": "finds the splitbench package",
    "TRANSFORMERS_OFFLINE": "the model is a folder: ask no hub",
    "UCX_LOG_LEVEL": "UCX says which transports each connection takes",
    "UCX_TLS": "transports that NIXL may use",
    "VLLM_CPU_KVCACHE_SPACE": "KV pool in GiB",
    "VLLM_CPU_OMP_THREADS_BIND": "the cores of this engine",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0: model and scheduler in one process",
    "VLLM_LOG_STATS_INTERVAL": "seconds between the server's own statistics lines",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "NIXL's handshake, on loopback only",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "port of NIXL's handshake, one per engine",
    "VLLM_NO_USAGE_STATS": "send no usage statistics",
    "VLLM_SERVER_DEV_MODE": "allows POST /reset_prefix_cache between cells, and GET /server_info",
    "VLLM_USE_V2_MODEL_RUNNER": "which model runner",
}

KV_TRANSFER: Mapping[str, str] = {
    "kv_connector": "the connector",
    "kv_connector_module_path": "its class: NixlConnector with a progress thread that pauses, for few cores",
    "kv_role": "this engine sends (kv_producer), receives (kv_consumer), or both",
    "kv_buffer_device": "where transfer buffers are",
    "kv_connector_extra_config": "settings of the connector's own",
    "discard_partial_chunks": "false: the last, unfinished chunk moves too",
    "splitbench.repairs": "faults of LMCache's connector that ours mends, see splitbench/serving/repaired_lmcache.py",
    "lmcache_rpc_port": "a name of its own for each engine's internal socket",
    "skip_last_n_tokens": "the decoder computes the last prompt token itself, which gives it the next one",
    "lmcache.mp.host": "where LMCache's server is",
    "lmcache.mp.port": "and its port",
}

LMCACHE_FILE: Mapping[str, str] = {
    "enable_pd": "prefill-decode mode",
    "local_cpu": "no second copy of KV in CPU memory",
    "max_local_cpu_size": "and none reserved",
    "nixl_backends": "NIXL moves KV by UCX (NVLink, shared memory, or what else there is)",
    "pd_buffer_device": "transfer buffers are in GPU memory (cuda) or in main memory (cpu)",
    "pd_buffer_size": "bytes of transfer buffer per rank",
    "pd_peer_alloc_port": "senders ask for memory here; one port per rank, each takes the one of its number",
    "pd_peer_host": "where senders reach this decoder",
    "pd_peer_init_port": "NIXL metadata is exchanged here; one port per rank, each takes the one of its number",
    "pd_proxy_host": "the proxy is told here that KV has been sent",
    "pd_proxy_port": "the proxy's --proxy-port",
    "pd_role": "prefill sends, decode receives",
    "save_decode_cache": "KV of generated tokens is not kept",
    "transfer_channel": "KV moves by NIXL",
}
