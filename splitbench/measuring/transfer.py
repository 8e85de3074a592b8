# SPDX-License-Identifier: Apache-2.0
"""Checks of the KV transfer: did the decoders load the prompts, is the answer still the same, over which transport."""

from __future__ import annotations

from typing import Any

from splitbench.measuring.evidence import Check, Evidence
from splitbench.measuring.logs import lmcache_loads, ucx_transports

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
HITS = "vllm:external_prefix_cache_hits_total"
BYTES = "vllm:nixl_bytes_transferred_sum"
FAILED = "vllm:nixl_num_failed_transfers_total"

# UCX's names for groups of transports, as UCX_TLS takes them.
_SHARED_MEMORY = {"posix", "sysv", "xpmem", "cma", "knem", "mm", "sm", "shm"}
_GROUPS: dict[str, set[str]] = {
    "sm": _SHARED_MEMORY,
    "shm": _SHARED_MEMORY,
    "mm": {"posix", "sysv", "xpmem", "mm"},
    "cuda": {"cuda_ipc", "cuda_copy", "gdr_copy"},
    "rc": {"rc_mlx5", "rc_verbs", "rc", "rc_x", "rc_v"},
    "rc_x": {"rc_mlx5", "rc_x"},
    "rc_v": {"rc_verbs", "rc_v"},
    "ud": {"ud_mlx5", "ud_verbs", "ud"},
    "dc": {"dc_mlx5", "dc"},
    "ib": {"rc_mlx5", "rc_verbs", "ud_mlx5", "ud_verbs", "dc_mlx5", "rc", "ud", "dc"},
    "tcp": {"tcp", "sockcm"},
}
# Not a way between two processes that hold KV cache, or one that UCX adds by itself.
_ALWAYS = {"self", "cuda_copy", "gdr_copy", "sockcm"}


def kv_moved(evidence: Evidence) -> Check | None:
    """The decoders loaded the prompts' KV instead of computing it again; None where nothing is to be moved."""
    if not evidence.of_role("decode"):
        return None
    if evidence.connector == "lmcache":
        return _moved_by_log(evidence)
    return _moved_by_counters(evidence)


def _needed(evidence: Evidence) -> tuple[int, int]:
    """Prompt tokens in all, and those of them that decoders should load."""
    lengths = [int(evidence.bench["input_lens"][index]) for index in evidence.good]
    if chunk := evidence.chunk_tokens:
        return sum(lengths), sum(max(0, n // chunk * chunk - 1) for n in lengths)
    # The last prompt token is always computed by the decoder itself where the connector leaves it out.
    return sum(lengths), sum(lengths) - len(lengths)


def _moved_by_counters(evidence: Evidence) -> Check:
    decoders = evidence.of_role("decode")
    moved = computed = 0.0
    for engine in decoders:
        loads = engine.growth(BY_SOURCE, source="external_kv_transfer")
        local = engine.growth(BY_SOURCE, source="local_compute")
        if loads is None or local is None:
            return Check(
                "kv-moved",
                "invalid",
                "a decoder does not count loaded tokens, so nothing proves that KV moved",
            )
        moved += loads
        computed += local
    prompt, needed = _needed(evidence)
    share = 100 * moved / max(needed, 1)
    sizes = [size for engine in decoders if (size := engine.growth(BYTES)) is not None]
    hits = sum(engine.growth(HITS) or 0.0 for engine in decoders)
    failed = sum(engine.growth(FAILED) or 0.0 for engine in decoders)
    figures: dict[str, Any] = {
        "prompt_tokens": prompt,
        "loaded_tokens": moved,
        "computed_tokens": computed,
        "hit_tokens": hits,
        "loaded_percent": round(share, 3),
        "moved_bytes": sum(sizes),
        "failed_transfers": failed,
    }
    limit = evidence.thresholds.kv_moved_percent
    limits = {"loaded_percent": limit}

    def invalid(reason: str) -> Check:
        return Check("kv-moved", "invalid", reason, figures, limits)

    if share < limit and 100 * hits / max(needed, 1) >= limit:
        return invalid(
            f"decoders hit {hits:.0f} prompt tokens but loaded only {moved:.0f}: a hit is not a load"
        )
    if share < limit:
        return invalid(f"decoders loaded only {share:.1f} % of the prompt tokens")
    if evidence.connector == "nixl" and needed and sizes and not sum(sizes):
        return invalid(f"{moved:.0f} tokens count as loaded, but NIXL moved no byte")
    if failed:
        return Check("kv-moved", "warn", f"{failed:.0f} transfers failed", figures, limits)
    return Check(
        "kv-moved",
        "ok",
        f"decoders loaded {moved:.0f} of {prompt} prompt tokens, computed {computed:.0f}",
        figures,
        limits,
    )


def _moved_by_log(evidence: Evidence) -> Check:
    """LMCache inside the engine: its own line per retrieval is the only proof; vLLM's counters count hits."""
    decoders = [log for log in evidence.logs.values() if log.role == "decode"]
    if not decoders:
        return Check("kv-moved", "invalid", "no decoder's log was kept, so nothing proves that KV moved")
    loads = [lmcache_loads(log.cell) for log in decoders]
    prompt, needed = _needed(evidence)
    loaded, found = sum(each.loaded for each in loads), sum(each.found for each in loads)
    share = 100 * loaded / max(needed, 1)
    figures: dict[str, Any] = {
        "prompt_tokens": prompt,
        "loaded_tokens": loaded,
        "hit_tokens": found,
        "retrievals": sum(each.retrievals for each in loads),
        "loaded_percent": round(share, 3),
    }
    limit = evidence.thresholds.kv_moved_percent
    limits = {"loaded_percent": limit}
    if share >= limit:
        reason = f"decoders retrieved {loaded} of {prompt} prompt tokens"
        return Check("kv-moved", "ok", reason, figures, limits)
    if 100 * found / max(needed, 1) >= limit:
        reason = f"decoders hit {found} prompt tokens but retrieved only {loaded}: a hit is not a load"
    else:
        reason = f"decoders retrieved only {share:.1f} % of the prompt tokens"
    return Check("kv-moved", "invalid", reason, figures, limits)


def same_answers(evidence: Evidence) -> Check | None:
    """What the session's smoke test said of its answers; None for layouts that move no KV."""
    if not evidence.of_role("decode"):
        return None
    found = (evidence.smoke or {}).get("same-answers")
    if found is None:
        return Check("same-answers", "warn", "the session was not asked before it was measured")
    return Check("same-answers", found["verdict"], found["reason"], dict(found.get("figures", {})))


def transport(evidence: Evidence) -> Check | None:
    """KV moved over a transport that the layout states; None where no UCX is involved."""
    if not evidence.of_role("decode") or evidence.connector not in ("nixl", "lmcache"):
        return None
    seen: set[str] = set()
    for log in evidence.logs.values():
        seen |= ucx_transports(log.start) | ucx_transports(log.cell)
    stated = {name for text in evidence.transports.values() for name in text.split(",") if name}
    figures: dict[str, Any] = {"seen": ",".join(sorted(seen)), "stated": ",".join(sorted(stated))}
    if not seen:
        return Check(
            "transport", "warn", "UCX did not say which transport it took (UCX_LOG_LEVEL=info does)", figures
        )
    if not stated or "all" in stated:
        return Check("transport", "ok", f"{', '.join(sorted(seen))}; the layout states none", figures)
    forbidden = {name[1:] for name in stated if name.startswith("^")}
    if forbidden:
        strange = seen & set().union(*(_GROUPS.get(name, {name}) for name in forbidden))
    else:
        allowed = set().union(*(_GROUPS.get(name, {name}) for name in stated)) | _ALWAYS
        strange = seen - allowed
    if strange:
        reason = f"UCX took {', '.join(sorted(strange))}; the layout states {', '.join(sorted(stated))}"
        return Check("transport", "invalid", reason, figures)
    return Check("transport", "ok", f"{', '.join(sorted(seen))}, as the layout states", figures)
