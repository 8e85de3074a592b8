# SPDX-License-Identifier: Apache-2.0
"""A small random Llama, written without torch: weights, config, a tokenizer that round-trips lengths
exactly.

It exists so that real engines can be measured where there is no GPU and no model hub. Two properties matter
more than its text. The tokenizer is word level, token i is the word "wi": any list of ids survives decode
and encode, so a random prompt of N tokens has exactly N tokens. And the greedy answer depends on the whole
prompt: a decoder that lost or mixed up KV cache gives another answer, where weights of the usual small
scale would hide it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from splitbench.errors import UserError
from splitbench.files import digest, read_json, sha256_file, write_json

RECORD = "synthetic-model.json"
# Part of the digest: raise it when the same spec gives other bytes.
_RECIPE = 1

# Standard deviations, as multiples of 1/sqrt(inputs). Queries and keys are large, so that attention picks few
# tokens instead of averaging all; values and outputs are large, so that what it picks outweighs the token's
# own embedding. Every layer then spreads each token's influence: the last position depends on all of them.
_GAINS = {
    "q_proj": 2.0,
    "k_proj": 2.0,
    "v_proj": 2.0,
    "o_proj": 2.0,
    "gate_proj": 1.0,
    "up_proj": 1.0,
    "down_proj": 1.0,
}
_EMBEDDING_STD = 1.0
_HEAD_GAIN = 3.0


class SyntheticModel(BaseModel):
    """What the model looks like. Sizes are in elements, `max_model_len` in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: int = Field(default=384, ge=32, le=8192, description="width of the model")
    layers: int = Field(default=4, ge=1, le=128, description="number of transformer layers")
    heads: int = Field(default=6, ge=1, description="attention heads")
    kv_heads: int = Field(
        default=6, ge=1, description="heads that have keys and values; KV cache grows with them"
    )
    intermediate_size: int = Field(default=1024, ge=32, description="width inside the feed-forward part")
    # The random dataset walks consecutive ids: with fewer, prompts begin to share prefixes.
    vocabulary: int = Field(default=32_000, ge=32_000, le=1_000_000, description="number of tokens")
    max_model_len: int = Field(
        default=4096, ge=128, description="longest prompt and answer together, in tokens"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="from which the weights are drawn")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="type of the weights on disk"
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> SyntheticModel:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError("hidden_size must be heads times an even head size")
        if self.heads % self.kv_heads:
            raise ValueError("heads must be a multiple of kv_heads")
        return self

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.heads

    @property
    def parameters(self) -> int:
        """Number of weights, embeddings included."""
        return sum(rows * columns for _, (rows, columns), _ in _matrices(self)) + self.hidden_size * (
            2 * self.layers + 1
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache of one token, all layers, with the cache in the model's dtype."""
        return 2 * self.layers * self.kv_heads * self.head_size * (4 if self.dtype == "float32" else 2)


def make_synthetic_model(spec: SyntheticModel, destination: Path) -> dict[str, Any]:
    """Write the model folder, or find it there; returns its record: spec, digest, sizes, sha256 per file.

    The same spec gives the same bytes, on any machine. The folder is written aside and renamed when complete.

    Raises:
        UserError: `destination` exists and is something else.
    """
    wanted = digest({"recipe": _RECIPE, "spec": spec.model_dump(mode="json")})
    if destination.exists():
        try:
            record = read_json(destination / RECORD)
        except (OSError, ValueError):
            record = {}
        if record.get("digest") == wanted:
            return record
        if not record and any(destination.iterdir()):
            raise UserError(
                "exists and is not a synthetic model",
                where=str(destination),
                mend="remove it or choose another folder",
            )
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as folder:
        aside = Path(folder) / "model"
        aside.mkdir()
        _write_weights(spec, aside / "model.safetensors")
        for name, value in _texts(spec).items():
            write_json(aside / name, value)
        record = {
            "digest": wanted,
            "spec": spec.model_dump(mode="json"),
            "parameters": spec.parameters,
            "kv_bytes_per_token": spec.kv_bytes_per_token,
            "sha256": {path.name: sha256_file(path) for path in sorted(aside.iterdir())},
        }
        write_json(aside / RECORD, record)
        if destination.exists():
            shutil.rmtree(destination)
        aside.rename(destination)
    return record


def special_tokens(spec: SyntheticModel) -> tuple[int, int]:
    """Ids of the first and last token of a text: the two highest of the vocabulary, never generated."""
    return spec.vocabulary - 2, spec.vocabulary - 1


def _matrices(spec: SyntheticModel) -> Iterator[tuple[str, tuple[int, int], float]]:
    """Name, shape (outputs, inputs) and standard deviation of every weight matrix, layer by layer."""
    hidden, wide, kv = spec.hidden_size, spec.intermediate_size, spec.kv_heads * spec.head_size
    yield "model.embed_tokens.weight", (spec.vocabulary, hidden), _EMBEDDING_STD
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    for layer in range(spec.layers):
        for name, shape in shapes.items():
            gain = _GAINS[name.split(".")[1]]
            yield f"model.layers.{layer}.{name}.weight", shape, gain / float(np.sqrt(shape[1]))
    yield "lm_head.weight", (spec.vocabulary, hidden), _HEAD_GAIN / float(np.sqrt(hidden))


def _uniform(seed: int, name: str, shape: tuple[int, int], std: float) -> npt.NDArray[np.float32]:
    """Random weights from raw generator bits: stable between numpy's versions, as distributions are not."""
    count = shape[0] * shape[1]
    raw = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())])).random_raw(
        (count + 1) // 2
    )
    bits = raw.astype("<u8", copy=False).view("<u4")[:count]
    # 24 bits are what a float32 holds exactly; the width gives a uniform distribution the wanted deviation.
    unit = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    return (unit * np.float32(std * np.sqrt(3.0))).reshape(shape)


def _tensors(spec: SyntheticModel) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    for name, shape, std in _matrices(spec):
        weights = _uniform(spec.seed, name, shape, std)
        if name == "lm_head.weight":
            weights[list(special_tokens(spec))] = (
                0.0  # a logit of 0 is never the highest: no answer ends early
            )
        yield name, weights
    ones = np.ones(spec.hidden_size, dtype=np.float32)
    for layer in range(spec.layers):
        yield f"model.layers.{layer}.input_layernorm.weight", ones
        yield f"model.layers.{layer}.post_attention_layernorm.weight", ones
    yield "model.norm.weight", ones


def _encoded(weights: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "float32":
        return weights.astype("<f4", copy=False).tobytes()
    if dtype == "float16":
        return weights.astype("<f2").tobytes()
    bits = weights.astype("<f4", copy=False).view("<u4")
    # bfloat16 is the upper half of a float32, rounded to nearest, ties to even.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def _write_weights(spec: SyntheticModel, path: Path) -> None:
    """Write the safetensors format itself: length of the header, header as JSON, then the tensors' bytes.

    Its Python package's function for this takes other arguments from version to version.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    bodies = []
    offset = 0
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    for name, weights in _tensors(spec):
        body = _encoded(weights, spec.dtype)
        header[name] = {
            "dtype": names[spec.dtype],
            "shape": list(weights.shape),
            "data_offsets": [offset, offset + len(body)],
        }
        bodies.append(body)
        offset += len(body)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the tensors on an 8-byte boundary
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.writelines(bodies)


def _texts(spec: SyntheticModel) -> dict[str, Any]:
    first, last = special_tokens(spec)
    words = {f"w{token}": token for token in range(first)}
    specials = {"<first>": first, "<last>": last}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": first,
            "dtype": spec.dtype,
            "eos_token_id": last,
            "head_dim": spec.head_size,
            "hidden_act": "silu",
            "hidden_size": spec.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": spec.intermediate_size,
            "max_position_embeddings": spec.max_model_len,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": spec.heads,
            "num_hidden_layers": spec.layers,
            "num_key_value_heads": spec.kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": spec.dtype,
            "vocab_size": spec.vocabulary,
        },
        # Only the ids: a temperature here would silently become the server's default.
        "generation_config.json": {"bos_token_id": first, "eos_token_id": last},
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": token,
                    "content": word,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for word, token in specials.items()
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": words | specials, "unk_token": "w0"},
        },
        "tokenizer_config.json": {
            "bos_token": "<first>",
            "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
            "clean_up_tokenization_spaces": False,
            "eos_token": "<last>",
            "model_max_length": spec.max_model_len,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }


def read_weights(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of a model folder as float32, whatever they are stored as."""
    header_size = int.from_bytes((path / "model.safetensors").read_bytes()[:8], "little")
    data = (path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + header_size])
    body = memoryview(data)[8 + header_size :]
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        part = body[begin:end]
        if entry["dtype"] == "F32":
            values = np.frombuffer(part, dtype="<f4")
        elif entry["dtype"] == "F16":
            values = np.frombuffer(part, dtype="<f2").astype(np.float32)
        else:
            values = (np.frombuffer(part, dtype="<u2").astype("<u4") << np.uint32(16)).view("<f4")
        found[name] = values.reshape(entry["shape"])
    return found
