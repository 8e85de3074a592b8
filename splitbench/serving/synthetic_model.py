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

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from splitbench.errors import UserError
from splitbench.files import digest, read_json, sha256_file, write_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RECORD = "synthetic-model.json"
# Part of the digest: raise it when the same spec gives other bytes.
_RECIPE = 2

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
# Matrices whose output is added to the residual stream; `residual_gain` scales them in deep models.
_RESIDUAL = frozenset({"o_proj", "down_proj"})
# Above this the weights go into several files, which are made side by side.
_SHARD_BYTES = 1_200_000_000


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
    residual_gain: float | None = Field(
        default=None,
        gt=0,
        description="factor on what each layer adds; deep models want less than 1, or rounding decides the answer",
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
    described = spec.model_dump(mode="json", exclude_none=True)
    wanted = digest({"recipe": _RECIPE, "spec": described})
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
        sums = _write_weights(spec, aside)
        for name, value in _texts(spec).items():
            write_json(aside / name, value)
        record = {
            "digest": wanted,
            "spec": described,
            "parameters": spec.parameters,
            "kv_bytes_per_token": spec.kv_bytes_per_token,
            "sha256": {
                path.name: sums.get(path.name) or sha256_file(path) for path in sorted(aside.iterdir())
            },
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
            matrix = name.split(".")[1]
            gain = _GAINS[matrix] * ((spec.residual_gain or 1.0) if matrix in _RESIDUAL else 1.0)
            yield f"model.layers.{layer}.{name}.weight", shape, gain / math.sqrt(shape[1])
    yield "lm_head.weight", (spec.vocabulary, hidden), _HEAD_GAIN / math.sqrt(hidden)


def _tensors(spec: SyntheticModel) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name, shape and standard deviation of every tensor, in the order of the file; a deviation of 0: all ones."""
    yield from _matrices(spec)
    for layer in range(spec.layers):
        yield f"model.layers.{layer}.input_layernorm.weight", (spec.hidden_size,), 0.0
        yield f"model.layers.{layer}.post_attention_layernorm.weight", (spec.hidden_size,), 0.0
    yield "model.norm.weight", (spec.hidden_size,), 0.0


Tensor = tuple[str, tuple[int, ...], float]


def _write_weights(spec: SyntheticModel, folder: Path) -> dict[str, str]:
    """Write one file, or several with an index where there is much; returns the sha256 of each."""
    size = 4 if spec.dtype == "float32" else 2
    shards: list[list[Tensor]] = [[]]
    held = 0
    for tensor in _tensors(spec):
        amount = size * math.prod(tensor[1])
        if held and held + amount > _SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += amount
    if len(shards) == 1:
        return {"model.safetensors": _write_shard(spec, shards[0], folder / "model.safetensors")}
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    places = {tensor[0]: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": spec.parameters * size}, "weight_map": places},
    )
    # numpy lets go of Python's lock in all that takes time here, so threads are enough.
    with ThreadPoolExecutor(min(len(shards), os.cpu_count() or 1)) as pool:
        sums = pool.map(
            lambda pair: _write_shard(spec, pair[1], folder / pair[0]), zip(names, shards, strict=True)
        )
        return dict(zip(names, sums, strict=True))


def _write_shard(spec: SyntheticModel, tensors: list[Tensor], path: Path) -> str:
    """Write the safetensors format itself: length of the header, header as JSON, then the tensors' bytes.

    Its Python package's function for this takes other arguments from version to version. Returns the sha256.
    """
    # numpy takes its time to load, and every job of the workflow loads this module for the spec.
    from splitbench.serving.synthetic_weights import pieces

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    for name, shape, _ in tensors:
        end = offset + math.prod(shape) * (4 if spec.dtype == "float32" else 2)
        header[name] = {"dtype": names[spec.dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the tensors on an 8-byte boundary
    checksum = hashlib.sha256()
    with path.open("wb") as handle:
        bodies = (
            body
            for tensor in tensors
            for body in pieces(*tensor, seed=spec.seed, dtype=spec.dtype, silent=special_tokens(spec)[0])
        )
        for body in chain([len(text).to_bytes(8, "little") + text], bodies):
            checksum.update(body)
            handle.write(body)
    return checksum.hexdigest()


FIRST_TOKEN, LAST_TOKEN = "<beginning>", "<end>"


def _texts(spec: SyntheticModel) -> dict[str, Any]:
    first, last = special_tokens(spec)
    words = {f"w{token}": token for token in range(first)}
    # vLLM refuses a text of more characters than its limit of tokens times the longest token. A word costs one more
    # than its own length, for the space; one long token makes room for it.
    specials = {FIRST_TOKEN: first, LAST_TOKEN: last}
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
            "bos_token": FIRST_TOKEN,
            "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
            "clean_up_tokenization_spaces": False,
            "eos_token": LAST_TOKEN,
            "model_max_length": spec.max_model_len,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }


def read_weights(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of a model folder as float32, whatever they are stored as and in how many files."""
    from splitbench.serving.synthetic_weights import decoded

    found: dict[str, npt.NDArray[np.float32]] = {}
    for file in sorted(path.glob("model*.safetensors")):
        data = file.read_bytes()
        header_size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_size])
        body = memoryview(data)[8 + header_size :]
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            found[name] = decoded(body[begin:end], entry["dtype"]).reshape(entry["shape"])
    return found
