# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from pydantic import ValidationError

from splitbench.errors import UserError
from splitbench.files import sha256_file
from splitbench.serving.synthetic_model import (
    SyntheticModel,
    _texts,
    make_synthetic_model,
    read_weights,
    special_tokens,
)
from tests.reference_llama import greedy, next_logits

SMALL = SyntheticModel(
    hidden_size=128, layers=4, heads=4, kv_heads=2, intermediate_size=256, max_model_len=512
)
WEIGHTS_SHA256 = "5d6fb936e745978a1780ca1622966341db0ca6eb97579b46ff8f7455ec1dd69e"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small"
    make_synthetic_model(SMALL, path)
    return path


def test_the_same_spec_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    record = make_synthetic_model(SMALL, tmp_path / "again")
    for name, expected in record["sha256"].items():
        assert sha256_file(tmp_path / "again" / name) == expected == sha256_file(model / name)
    other = make_synthetic_model(SMALL.model_copy(update={"seed": 1}), tmp_path / "other")
    assert other["sha256"]["model.safetensors"] != record["sha256"]["model.safetensors"]
    assert other["digest"] != record["digest"]


def test_the_bytes_are_the_same_on_every_machine(model: Path) -> None:
    # Written down once; a change of numpy, machine or recipe that alters the weights must be seen.
    assert sha256_file(model / "model.safetensors") == WEIGHTS_SHA256


def test_a_complete_model_is_kept_another_replaced_and_a_strange_folder_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model"
    first = make_synthetic_model(SMALL, path)
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert make_synthetic_model(SMALL, path) == first
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    changed = make_synthetic_model(SMALL.model_copy(update={"layers": 1}), path)
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 1
    assert changed["digest"] != first["digest"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]  # nothing left aside
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not a synthetic model"):
        make_synthetic_model(SMALL, strange)
    assert (strange / "thesis.tex").exists()


def test_the_file_is_what_safetensors_itself_reads(model: Path) -> None:
    theirs = safetensors.numpy.load_file(model / "model.safetensors")
    ours = read_weights(model)
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[name], ours[name]) for name in theirs)
    assert sum(weights.size for weights in ours.values()) == SMALL.parameters


@pytest.mark.parametrize(("dtype", "relative"), [("bfloat16", 2.0**-8), ("float16", 2.0**-10)])
def test_shorter_types_are_the_same_weights_rounded(
    model: Path, tmp_path: Path, dtype: str, relative: float
) -> None:
    make_synthetic_model(SMALL.model_copy(update={"dtype": dtype}), tmp_path / dtype)
    exact, rounded = read_weights(model), read_weights(tmp_path / dtype)
    for name, weights in exact.items():
        assert np.allclose(weights, rounded[name], rtol=relative, atol=1e-6), name
    assert (tmp_path / dtype / "model.safetensors").stat().st_size < 0.51 * (
        model / "model.safetensors"
    ).stat().st_size


def test_weights_have_the_spread_they_should_have(model: Path) -> None:
    weights = read_weights(model)
    queries = weights["model.layers.0.self_attn.q_proj.weight"]
    assert np.std(queries) == pytest.approx(2.0 / np.sqrt(SMALL.hidden_size), rel=0.03)
    assert abs(np.mean(queries)) < 0.01
    assert np.abs(queries).max() <= np.sqrt(3) * 2.0 / np.sqrt(SMALL.hidden_size) * 1.001
    assert not np.array_equal(queries, weights["model.layers.1.self_attn.q_proj.weight"])


def test_much_goes_into_several_files_with_the_same_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitbench.serving.synthetic_model._SHARD_BYTES", 5_000_000)
    record = make_synthetic_model(SMALL, tmp_path / "sharded")
    files = sorted(path.name for path in (tmp_path / "sharded").glob("*.safetensors"))
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == 4 * SMALL.parameters
    for name in files:
        assert record["sha256"][name] == sha256_file(tmp_path / "sharded" / name)
        held = safetensors.numpy.load_file(tmp_path / "sharded" / name)
        assert set(held) == {tensor for tensor, file in index["weight_map"].items() if file == name}
    one, several = read_weights(model), read_weights(tmp_path / "sharded")
    assert one.keys() == several.keys()
    assert all(np.array_equal(one[name], several[name]) for name in one)


def test_the_residual_gain_scales_what_layers_add_and_nothing_else(model: Path, tmp_path: Path) -> None:
    make_synthetic_model(SMALL.model_copy(update={"residual_gain": 0.5}), tmp_path / "half")
    full, half = read_weights(model), read_weights(tmp_path / "half")
    for name, weights in full.items():
        factor = 0.5 if "o_proj" in name or "down_proj" in name else 1.0
        assert np.allclose(half[name], factor * weights, rtol=1e-6), name


def test_the_first_token_of_a_long_prompt_decides_the_answer(model: Path) -> None:
    weights = read_weights(model)
    generator = random.Random(4)
    for _ in range(3):
        prompt = [generator.randrange(31_000) for _ in range(300)]
        other = [prompt[0] + 1, *prompt[1:]]
        assert greedy(weights, SMALL, prompt, 3) != greedy(weights, SMALL, other, 3)
        # By far more than rounding: lost KV shows, and a different order of additions does not.
        logits, moved = next_logits(weights, SMALL, prompt), next_logits(weights, SMALL, other)
        assert np.linalg.norm(moved - logits) > 0.2 * np.linalg.norm(logits)


def test_no_answer_ends_early(model: Path) -> None:
    weights = read_weights(model)
    generator = random.Random(5)
    for _ in range(5):
        logits = next_logits(weights, SMALL, [generator.randrange(31_998) for _ in range(20)])
        assert all(logits[token] == 0.0 < logits.max() for token in special_tokens(SMALL))
    defaults = json.loads((model / "generation_config.json").read_text())
    assert set(defaults) == {
        "bos_token_id",
        "eos_token_id",
    }  # anything else would change the server's sampling


def test_every_token_is_one_word_and_back(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(SMALL.vocabulary))
    assert all(len(word.split()) == 1 for word in vocabulary)
    assert tokenizer["post_processor"] is None  # no first token is slipped in


@pytest.mark.parametrize(
    "wrong",
    [
        {"heads": 5},
        {"kv_heads": 3},
        {"vocabulary": 1000},
        {"hidden_size": 129},
        {"layers": 0},
        {"dtype": "int8"},
        {"depth": 3},
    ],
)
def test_a_shape_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SyntheticModel.model_validate({**SMALL.model_dump(), **wrong})


def test_the_longest_prompt_has_no_more_characters_than_vllm_allows() -> None:
    """vLLM 0.26 refuses a text longer than its limit of tokens times the longest token of the tokenizer."""
    spec = SMALL.model_copy(update={"vocabulary": 1_000_000})
    vocabulary = _texts(spec)["tokenizer.json"]["model"]["vocab"]
    longest_word = max(len(word) for word in vocabulary if word.startswith("w"))
    assert longest_word + len(" ") <= max(map(len, vocabulary))
