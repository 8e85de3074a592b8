# SPDX-License-Identifier: Apache-2.0
"""The numbers of a synthetic model's tensors, and their bytes in a safetensors file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

# Weights are made in pieces that stay in a core's cache; even, since one number of the generator gives two weights.
_PIECE = 1 << 18


def _uniform(seed: int, name: str, count: int, std: float) -> Iterator[npt.NDArray[np.float32]]:
    """Random weights from raw generator bits, piece by piece: stable between numpy's versions, as distributions
    are not.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    width = np.float32(std * np.sqrt(3.0))  # gives a uniform distribution the wanted deviation
    for begin in range(0, count, _PIECE):
        size = min(_PIECE, count - begin)
        raw = bits.random_raw((size + 1) // 2).astype("<u8", copy=False).view("<u4")[:size]
        # 24 bits are what a float32 holds exactly.
        unit = (raw >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
        yield unit * width


def pieces(
    name: str, shape: tuple[int, ...], std: float, *, seed: int, dtype: str, silent: int
) -> Iterator[bytes]:
    """A tensor's bytes as they stand in the file.

    Args:
        name: the tensor's; together with the seed it decides the weights.
        shape: (outputs, inputs), or the length of a vector.
        std: standard deviation of its weights; 0 for all ones.
        seed: of the model.
        dtype: float32, float16 or bfloat16.
        silent: rows of the output matrix from this one on are 0.
    """
    if std == 0.0:
        yield _encoded(np.ones(shape, dtype=np.float32), dtype)
        return
    count, width = int(np.prod(shape)), shape[1]
    # A logit of 0 is never the highest: no answer ends early.
    zeros = silent * width if name == "lm_head.weight" else count
    begin = 0
    for piece in _uniform(seed, name, count, std):
        piece[max(0, zeros - begin) :] = 0.0
        begin += piece.size
        yield _encoded(piece, dtype)


def _encoded(weights: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "float32":
        return weights.astype("<f4", copy=False).tobytes()
    if dtype == "float16":
        return weights.astype("<f2").tobytes()
    bits = weights.astype("<f4", copy=False).view("<u4")
    # bfloat16 is the upper half of a float32, rounded to nearest, ties to even.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def decoded(part: memoryview, dtype: str) -> npt.NDArray[np.float32]:
    """Weights as float32 from a tensor's bytes; `dtype` as the safetensors format names it."""
    if dtype == "F32":
        return np.frombuffer(part, dtype="<f4")
    if dtype == "F16":
        return np.frombuffer(part, dtype="<f2").astype(np.float32)
    return (np.frombuffer(part, dtype="<u2").astype("<u4") << np.uint32(16)).view("<f4")
