"""Targets in GGUF files: the same as from a folder, and one line for what is wrong with a file."""

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize, quantize

from dspark_jax.io import files, hf, model_config
from dspark_jax.layers import apply_rope, rope_angles
from tests.dspark_jax.io.conftest import refused, same
from tests.dspark_jax.io.gguf_writer import CONFIG, metadata, neighbours, random_target, tensors
from tests.dspark_jax.io.gguf_writer import write as write_file


@pytest.fixture(scope="module")
def params():
    return random_target()


@pytest.fixture
def write(params, tmp_path):
    """Writes a file with other metadata (None: without it) or other tensors."""

    def file(*, keys=(), arrays=(), **kwargs):
        values = metadata() | dict(keys)
        found = tensors(params) | dict(arrays)
        return write_file(
            tmp_path / "model.gguf",
            {k: v for k, v in values.items() if v is not None},
            {k: v for k, v in found.items() if v is not None},
            **kwargs,
        )

    return file


def test_a_file_is_what_the_folder_is(write, params, tmp_path):
    hf.save_target(tmp_path / "folder", CONFIG, params)
    expected_cfg, expected = hf.load_target(tmp_path / "folder")
    cfg, found = hf.load_target(write())
    assert cfg == expected_cfg == CONFIG
    same(found, expected)


def test_an_untied_head(tmp_path):
    cfg = dataclasses.replace(CONFIG, tie_embeddings=False)
    params = random_target(cfg)
    path = write_file(tmp_path / "model.gguf", metadata(), tensors(params, cfg))
    found_cfg, found = hf.load_target(path)
    assert found_cfg == cfg
    same(found, params)


def test_rotated_neighbours_are_rotated_halves():
    """Scores of q and k are the same, whichever rows make up a pair."""
    rng = np.random.default_rng(0)
    h, width = CONFIG.head_dim, CONFIG.hidden_size
    wq, wk = rng.normal(size=(2, h, width))
    x, y = rng.normal(size=(2, width))
    angles = rope_angles(jnp.array([5, 9]), CONFIG.rope, h)
    q, k = apply_rope(jnp.float32(np.stack([wq @ x, wk @ y])[:, None, None]), angles)[:, 0, 0]

    def turned(w, x, position):
        pairs = (neighbours(w, h) @ x).reshape(-1, 2)
        for i, frequency in enumerate(CONFIG.rope.frequencies(h)):
            c, s = np.cos(position * frequency), np.sin(position * frequency)
            pairs[i] = [[c, -s], [s, c]] @ pairs[i]
        return pairs.ravel()

    np.testing.assert_allclose(q @ k, turned(wq, x, 5) @ turned(wk, y, 9), rtol=1e-5)


def test_quantised_tensors(write, params):
    names = {"token_embd.weight", "blk.1.ffn_down.weight", "blk.0.attn_q.weight"}
    _, found = hf.load_target(write(packed=names))
    arrays, back = tensors(params), tensors(found)
    for name, array in arrays.items():
        if name in names:
            packed = quantize(array, GGMLQuantizationType.Q8_0)
            assert np.abs(back[name] - array).max() > 1e-4
            array = dequantize(packed, GGMLQuantizationType.Q8_0)
        np.testing.assert_array_equal(back[name], array, err_msg=name)


def test_defaults_of_sparse_metadata(write):
    cfg = model_config.load_target_config(
        write(keys={"llama.rope.freq_base": None, "llama.attention.head_count_kv": None})
    )
    assert cfg.rope.theta == 10_000
    assert cfg.num_kv_heads == CONFIG.num_heads


def test_every_end_is_a_stop(write):
    ends = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    assert model_config.load_target_config(write(keys=ends)).stop_token_ids == (2, 0)
    none = {"tokenizer.ggml.eos_token_id": None}
    assert model_config.load_target_config(write(keys=none)).stop_token_ids == ()


def test_fingerprint_is_of_all_but_the_weights(write):
    first = files.fingerprint(write())
    ones = np.ones(CONFIG.hidden_size, np.float32)
    assert files.fingerprint(write(arrays={"output_norm.weight": ones})) == first
    assert files.fingerprint(write(keys={"tokenizer.ggml.eos_token_id": 1})) != first


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": "3"}, "llama.block_count='3', expected int"),
        (
            {"llama.attention.head_count_kv": 3},
            "expected a multiple of num_kv_heads=3",
        ),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "rms_epsilon is missing"),
        ({"llama.attention.value_length": 4}, "value_length=4, expected 8 as of keys"),
        ({"llama.rope.dimension_count": 4}, "dimension_count=4, expected 8 as of keys"),
        ({"llama.rope.scaling.type": "yarn"}, "scaling.type='yarn', expected 'none'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a"]}, "has shape [267, 32], expected [1, 32]"),
        (
            {"llama.feed_forward_length": 32},
            "gate.weight has shape [64, 32], expected [32, 32]",
        ),
        ({"llama.block_count": 4}, "model.layers.3.input_layernorm.weight is missing"),
    ],
)
def test_metadata_that_does_not_do(write, keys, message):
    assert message in refused(hf.load_target, write(keys=keys))


def test_another_architecture(write):
    message = refused(hf.load_target, write(kind="gemma3"))
    assert message.endswith("architecture 'gemma3' is not known, expected 'llama'")


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.ffn_norm_2.weight"]
)
def test_tensors_that_would_change_the_model(write, name):
    message = refused(hf.load_target, write(arrays={name: np.ones(4, np.float32)}))
    assert message.endswith(f"not supported: tensors {name}")


def test_a_tensor_is_missing(write):
    path = write(arrays={"blk.2.attn_k.weight": None})
    message = "tensor model.layers.2.self_attn.k_proj.weight is missing"
    assert message in refused(hf.load_target, path)


@pytest.mark.parametrize("kept", [0, 3, 20, 500, 4000, -4])
def test_a_part_of_a_file(write, kept):
    path = write()
    path.write_bytes(path.read_bytes()[:kept])
    assert "not a whole GGUF file" in refused(hf.load_target, path)


def test_text_that_is_none(write):
    path = write()
    path.write_bytes(path.read_bytes().replace(b"llama", b"llam\xff", 1))
    assert "general.architecture is not UTF-8" in refused(hf.load_target, path)


def test_something_else_under_that_name(write):
    path = write()
    path.write_bytes(b"PK" + path.read_bytes())
    assert "not a whole GGUF file" in refused(hf.load_target, path)


def test_no_file(tmp_path):
    path = tmp_path / "absent.gguf"
    assert refused(hf.load_target, path) == f"{path}: no such file"
    path.mkdir()
    assert refused(hf.load_target, path) == f"{path}: no such file"


def test_a_file_is_read_again_when_it_has_changed(write):
    assert hf.load_target(write())[0] == CONFIG
    assert hf.load_target(write(keys={"llama.context_length": 99}))[0].max_position == 99


def test_without_the_extra(write, monkeypatch):
    path = write()
    monkeypatch.setitem(sys.modules, "gguf", None)
    message = refused(hf.load_target, path)
    assert message == f"{path}: to read GGUF files install dspark_jax[gguf]"


def test_a_drafter_is_a_folder(write):
    assert refused(hf.load_drafter, write()).endswith("model.gguf: expected a folder")
