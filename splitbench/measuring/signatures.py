# SPDX-License-Identifier: Apache-2.0
"""Lines of engines' logs that tell something about a measurement: one entry each, with where it is known from.

`python -m splitbench.measuring.signatures docs/log-signatures.md` writes the page about them.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from splitbench.files import write_text

Judgement = Literal["note", "warn", "invalid"]
"""`note`: said and compared between layouts, but nothing against the cell by itself."""


@dataclass(frozen=True)
class Signature:
    """One kind of line.

    Attributes:
        id: short name, stable.
        pattern: regular expression, searched within one line.
        judgement: what a line of this kind means for the cell.
        meaning: in one sentence.
        source: public place where it is reported or explained.
        mend: what to do.
        roles: engines it is looked for in; empty: all.
        gpu_only: says nothing where engines run on CPU cores.
        answer: regular expression of the line that must follow for the same request (both name it in a group
            `request`); only a line without its answer counts.
    """

    id: str
    pattern: str
    judgement: Judgement
    meaning: str
    source: str
    mend: str
    roles: tuple[str, ...] = ()
    gpu_only: bool = False
    answer: str = ""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern."""
        return re.compile(self.pattern)

    def applies(self, role: str, on_gpus: bool) -> bool:
        """Whether it is looked for in an engine of this role."""
        return (not self.roles or role in self.roles) and (on_gpus or not self.gpu_only)


_VLLM = "https://github.com/vllm-project/vllm"
_LMCACHE = "https://github.com/LMCache/LMCache"
_NIXL = "https://github.com/ai-dynamo/nixl"

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "lmcache-degraded",
        r"System will operate in degraded mode|LMCacheEngine marked as init failed",
        "invalid",
        "LMCache did not initialise; the engine serves on without moving any KV cache and computes every prompt again.",
        f"{_LMCACHE}/issues/2854",
        "read the error above that line; most often UCX or NIXL can't register the buffer",
    ),
    Signature(
        "lmcache-never-loaded",
        r"Reqid: (?P<request>\S+?),.* LMCache hit tokens: \d+, need to load: [1-9]",
        "invalid",
        "The decoder reports a hit but never retrieves it: it decodes on KV cache that is not there, at full speed.",
        f"{_VLLM}/issues/52617",
        "take the V1 model runner (VLLM_USE_V2_MODEL_RUNNER=0) or another pair of versions",
        roles=("decode",),
        answer=r"(?:\[req_id=(?P<request>\S+?)\] )?Retrieved \d+ out of ",
    ),
    Signature(
        "lmcache-decoder-miss",
        r"LMCache hit tokens: 0, need to load: 0",
        "warn",
        "The decoder finds nothing although the prefiller has sent: it computes the prompt again.",
        f"{_LMCACHE}/issues/1547",
        "give both sides the same PYTHONHASHSEED and chunk size, and a receiver's buffer that is large enough",
        roles=("decode",),
    ),
    Signature(
        "lmcache-partly-retrieved",
        r"Retrieved (\d+) out of (?!\1\b)\d+ required",
        "warn",
        "Only a part of the prompt was retrieved; the decoder computes the rest.",
        f"{_LMCACHE}/issues/1251",
        "look for failed allocations in the same log; raise pd_buffer_size",
        roles=("decode",),
    ),
    Signature(
        "lmcache-no-memory",
        r"Failed to allocate memory object",
        "invalid",
        "The transfer buffer is full and the sender waits in a loop: latencies hold that wait, or never end.",
        f"{_LMCACHE}/issues/1337",
        "raise pd_buffer_size (kv_buffer_gb) on both sides, lower the concurrency, set pd_allocation_timeout_sec",
    ),
    Signature(
        "lmcache-not-on-cpu",
        r"No supported \S+ connector found",
        "invalid",
        "LMCache's in-process connector does not know this device; vLLM stays up without moving any KV cache.",
        f"{_LMCACHE}/pull/3309",
        "use connector 'nixl' or 'lmcache-mp' on CPU",
    ),
    Signature(
        "nixl-backend-error",
        r"NIXL_ERR_BACKEND",
        "invalid",
        "NIXL's backend (UCX) refused an operation, most often registering the KV cache's memory.",
        f"{_NIXL}/issues/177",
        "see UCX's own lines above; its CUDA modules must be found beside NIXL",
    ),
    Signature(
        "nixl-handshake-failed",
        r"handshake_(?:setup_)?failed|Handshake failed for request|Handshake with \S+ failed"
        r"|Remote NIXL agent engine ID mismatch",
        "invalid",
        "Decoder and prefiller could not introduce themselves; the decoder computes the prompt again or fails.",
        f"{_VLLM}/issues/27083",
        "give every engine its own VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, and both sides the same parallel sizes",
    ),
    Signature(
        "nixl-incompatible",
        r"NIXL compatibility hash mismatch",
        "invalid",
        "Prefiller and decoder differ in a version or setting that decides the KV cache's layout.",
        f"{_VLLM}/pull/29503",
        "start both with the same vLLM, model, dtype and connector settings",
    ),
    Signature(
        "nixl-transfer-failed",
        r"NIXL transfer failure: (?!handshake)|Skipping KV post-processing for failed request",
        "invalid",
        "A transfer failed; the decoder computes those tokens again or fails the request.",
        f"{_VLLM}/pull/41863",
        "see the context in that line; is the prefiller still alive?",
    ),
    Signature(
        "nixl-lease-expired",
        r"Releasing expired KV blocks for request",
        "invalid",
        "The prefiller gave up KV cache that nobody had fetched in time; a decoder that comes later reads other data.",
        f"{_VLLM}/pull/21753",
        "find out why decoders are late (a busy core, a slow transport); raise kv_lease_duration",
        roles=("prefill",),
    ),
    Signature(
        "nixl-late-read",
        r"Potentially invalid KV blocks for unrecognized request",
        "invalid",
        "A decoder fetched KV cache after it was given up: its answer may rest on another request's data.",
        "https://github.com/vllm-project/aibrix/issues/1772",
        "as for nixl-lease-expired",
        roles=("prefill",),
    ),
    Signature(
        "ucx-no-cuda",
        r"transports '[^']*cuda[^ ]* (?:are|is) not available|UCX CUDA support was not found"
        r"|VRAM memory is detected as host by UCX",
        "invalid",
        "UCX has no CUDA transports: GPU memory can't be moved directly, if at all.",
        f"{_LMCACHE}/issues/605",
        "UCX's CUDA modules must be real files beside its libraries, not lost links",
    ),
    Signature(
        "ucx-tcp-for-gpus",
        r"cfg#\d+.*\brma\w*\(tcp/",
        "warn",
        "GPU memory is moved over TCP: a hundred times slower than between neighbouring GPUs.",
        f"{_NIXL}/issues/1097",
        "see which transports UCX found (UCX_LOG_LEVEL=info); UCX_TLS must hold cuda_ipc or an RDMA transport",
        gpu_only=True,
    ),
    Signature(
        "preemption",
        r"is preempted by PreemptionMode|Preempting request \S+",
        "invalid",
        "The KV cache was too small for the load: a request was thrown out and computed again.",
        "https://docs.vllm.ai/en/latest/configuration/optimization.html",
        "give the engine more memory or cores' KV space, or lower the concurrency",
    ),
    Signature(
        "hybrid-kv-manager-off",
        r"Turning off hybrid kv cache manager|Hybrid KV cache manager is disabled",
        "note",
        "The connector switched the hybrid KV cache manager off; a model with sliding windows then needs more memory.",
        f"{_VLLM}/issues/41830",
        "compare with an aggregated layout that has disable-hybrid-kv-cache-manager set",
    ),
    Signature(
        "cuda-graphs-off",
        r"Cudagraph is disabled under eager mode|Enforce eager set, disabling|Skipping CUDA graph capture",
        "warn",
        "Decode steps run without CUDA graphs, which costs several times the ITL of small batches.",
        f"{_VLLM}/issues/4449",
        "drop enforce-eager, or set it for every layout that is compared",
        gpu_only=True,
    ),
    Signature(
        "compiled-while-serving",
        r"JIT compilation during inference",
        "warn",
        "A kernel was compiled while requests were served: a pause that is no property of the layout.",
        f"{_VLLM}/issues/43009",
        "warm up with the lengths and concurrency that are measured",
    ),
    Signature(
        "worker-stalled",
        r"No available shared memory broadcast block found",
        "warn",
        "A worker did not answer for a minute.",
        f"{_VLLM}/issues/27313",
        "look for compiling or hanging transfers in the workers' lines",
    ),
    Signature(
        "illegal-address",
        r"illegal memory access was encountered",
        "invalid",
        "A kernel or a copy touched memory that is not its own; the process is lost.",
        f"{_LMCACHE}/issues/1422",
        "try another pair of versions, --no-async-scheduling or a lower concurrency",
    ),
    Signature(
        "engine-died",
        r"EngineDeadError|EngineCore encountered a fatal error|EngineCore failed to start"
        r"|Engine core proc \S+ died unexpectedly|WorkerProc hit an exception",
        "invalid",
        "The engine's core process failed.",
        f"{_VLLM}/issues/27549",
        "the first error above that line says why",
    ),
    Signature(
        "out-of-memory",
        r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|DefaultCPUAllocator: can't allocate memory"
        r"|[Oo]ut of memory: Killed process|oom-kill",
        "invalid",
        "Memory ran out, on the GPU or the machine.",
        f"{_VLLM}/issues/43222",
        "lower memory_share or the KV space; is another process on the device?",
    ),
    Signature(
        "kv-cache-too-small",
        r"No available memory for the cache blocks|KV cache is needed, which is larger than the available",
        "invalid",
        "There is no room for the KV cache of a single request of full length.",
        f"{_VLLM}/issues/41830",
        "lower max-model-len, raise memory_share or the KV space",
    ),
    Signature(
        "port-in-use",
        r"[Aa]ddress already in use|EADDRINUSE",
        "invalid",
        "Somebody else has a port that the plan gives to this engine.",
        f"{_VLLM}/issues/8204",
        "set node.base_port to a free range",
    ),
    Signature(
        "token-out-of-vocabulary",
        r"Token id \d+ is out of vocabulary",
        "invalid",
        "The client's tokenizer knows tokens that the model does not: they don't belong together.",
        f"{_VLLM}/issues/13175",
        "give client and engines the same model folder",
    ),
)

_HEAD = """\
<!-- Made by `python -m splitbench.measuring.signatures docs/log-signatures.md`. -->

# What is looked for in engines' logs

Each engine's log is searched twice for every cell: from its start until it was ready, and what it wrote during
the cell. `note` says something that is compared between layouts, `warn` is shown beside the numbers, `invalid`
keeps the cell out of every statement (check `server-log`).

| id | counts as | in the log of | means | known from |
|---|---|---|---|---|
"""


def render() -> str:
    """The page, as Markdown."""
    rows, mends = [], []
    for one in SIGNATURES:
        where = ", ".join(one.roles) or "all engines"
        if one.gpu_only:
            where += ", on GPUs"
        rows.append(f"| `{one.id}` | {one.judgement} | {where} | {one.meaning} | {_link(one.source)} |")
        code = one.pattern.replace("|", "\\|")
        answer = one.answer.replace("|", "\\|")
        searched = f"`{code}`" + (f" without a later `{answer}` of the same request" if answer else "")
        mends.append(f"| `{one.id}` | {one.mend} | {searched} |")
    lines = [
        _HEAD + "\n".join(rows),
        "## What to do, and what is searched",
        "| id | mend | pattern |\n|---|---|---|",
    ]
    return "\n\n".join(lines) + "\n" + "\n".join(mends) + "\n"


def _link(address: str) -> str:
    """A link that a narrow column can hold: `LMCache#2854`, or the site's name."""
    parts = address.split("/")
    issue = parts[-2] in ("issues", "pull")
    return f"[{parts[4]}#{parts[-1]}]({address})" if issue else f"[{parts[2]}]({address})"


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), render())
