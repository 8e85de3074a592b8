# SPDX-License-Identifier: Apache-2.0
"""A Llama forward pass in plain numpy, from the architecture's definition: what an engine ought to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from splitbench.serving.synthetic_model import SyntheticModel

Array = npt.NDArray[np.float32]


def next_logits(weights: Mapping[str, Array], spec: SyntheticModel, tokens: Sequence[int]) -> Array:
    """Logits of the token after `tokens`, shape (vocabulary,)."""
    count, size = len(tokens), spec.head_size
    frequencies = 10000.0 ** (-np.arange(0, size, 2) / size)
    angles = np.arange(count)[:, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32)[:, None], np.sin(angles).astype(np.float32)[:, None]

    def turned(x: Array) -> Array:
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def normed(x: Array) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-5))

    later = np.triu(np.full((count, count), -np.inf, dtype=np.float32), 1)
    x = weights["model.embed_tokens.weight"][list(tokens)]
    for layer in range(spec.layers):
        of = f"model.layers.{layer}."
        h = normed(x)
        q = turned((h @ weights[of + "self_attn.q_proj.weight"].T).reshape(count, spec.heads, size))
        k = turned((h @ weights[of + "self_attn.k_proj.weight"].T).reshape(count, spec.kv_heads, size))
        v = (h @ weights[of + "self_attn.v_proj.weight"].T).reshape(count, spec.kv_heads, size)
        k, v = (np.repeat(part, spec.heads // spec.kv_heads, axis=1) for part in (k, v))
        scores = np.matmul(q.transpose(1, 0, 2), k.transpose(1, 2, 0)) / np.float32(np.sqrt(size)) + later
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed = np.matmul(shares, v.transpose(1, 0, 2)).transpose(1, 0, 2).reshape(count, -1)
        x = x + mixed @ weights[of + "self_attn.o_proj.weight"].T
        h = normed(x)
        gate = h @ weights[of + "mlp.gate_proj.weight"].T
        wide = gate / (1 + np.exp(-gate)) * (h @ weights[of + "mlp.up_proj.weight"].T)
        x = x + wide @ weights[of + "mlp.down_proj.weight"].T
    return np.asarray(normed(x[-1]) @ weights["lm_head.weight"].T)


def greedy(
    weights: Mapping[str, Array], spec: SyntheticModel, tokens: Sequence[int], count: int
) -> list[int]:
    """The `count` tokens that follow, each the one with the highest logit."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(next_logits(weights, spec, text).argmax()))
    return text[len(tokens) :]
