"""Weights of a folder, in one file or in shards, and a line for each that is wrong."""

import functools
import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.io import hf
from tests.dspark_jax.io.conftest import LOADERS, edit_config, edit_tensors, refused, same


def shard(folder, parts=3):
    """The folder's one file as several with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        part = {n: t for j, (n, t) in enumerate(sorted(tensors.items())) if j % parts == i}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map):
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_shards(target_folder, saved):
    shard(target_folder)
    cfg, params = hf.load_target(target_folder)
    expected_cfg, expected = hf.load_target(saved / "target")
    assert cfg == expected_cfg
    same(params, expected)


def test_shardings(saved):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.P(None, "x"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())

    def place(specs):
        return jax.tree.map(lambda s: split if s.shape == (20, 12) else whole, specs)

    _, params = hf.load_target(saved / "target", place=place)
    assert params.embed.sharding == split
    assert params.embed.addressable_shards[0].data.shape == (20, 6)
    assert params.norm.sharding == whole
    expected = hf.load_target(saved / "target")[1]
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@LOADERS
def test_no_weights(load, target_folder, draft_folder):
    folder = target_folder if load is hf.load_target else draft_folder
    (folder / "model.safetensors").unlink()
    assert "expected model.safetensors or model.safetensors.index.json" in refused(load, folder)


@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_truncated_file(target_folder, size):
    path = target_folder / "model.safetensors"
    assert path.stat().st_size > size
    path.write_bytes(path.read_bytes()[:size])
    message = refused(hf.load_target, target_folder)
    assert f"{path}: not a whole safetensors file" in message


def test_truncated_shard(target_folder):
    file = sorted(set(shard(target_folder).values()))[1]
    path = target_folder / file
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path}: not a whole safetensors file" in refused(hf.load_target, target_folder)


def test_missing_shard(target_folder):
    file = sorted(set(shard(target_folder).values()))[2]
    (target_folder / file).unlink()
    message = refused(hf.load_target, target_folder)
    assert message == f"{target_folder / file}: shard is missing, but the index names it"


def test_index_that_names_a_tensor_its_shard_lacks(target_folder):
    weight_map = shard(target_folder)
    other = next(f for f in weight_map.values() if f != weight_map["model.norm.weight"])
    write_index(target_folder, {**weight_map, "model.norm.weight": other})
    message = refused(hf.load_target, target_folder)
    assert "tensor model.norm.weight is missing, but the index names it" in message


@pytest.mark.parametrize("text", ["{}", "{", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_bad_index(target_folder, text):
    (target_folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refused(hf.load_target, target_folder)


def test_index_that_points_elsewhere(target_folder):
    write_index(target_folder, {"model.norm.weight": "../secret.safetensors"})
    assert "files beside it" in refused(hf.load_target, target_folder)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.self_attn.k_norm.weight"])
def test_missing_tensor(target_folder, name):
    edit_tensors(target_folder, lambda t: {n: v for n, v in t.items() if n != name})
    assert refused(hf.load_target, target_folder).endswith(f": tensor {name} is missing")


def test_missing_tensor_of_a_drafter(draft_folder):
    name = "markov_head.markov_w2.weight"
    edit_tensors(draft_folder, lambda t: {n: v for n, v in t.items() if n != name})
    assert refused(hf.load_drafter, draft_folder).endswith(f": tensor {name} is missing")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.weight", (12, 12)),
        ("layers.1.self_attn.q_proj.weight", (12, 24)),
        ("norm.weight", (1, 12)),
        ("confidence_head.proj.weight", (1, 12)),
    ],
)
def test_wrong_shape(draft_folder, name, shape):
    right = list(load_file(draft_folder / "model.safetensors")[name].shape)
    edit_tensors(draft_folder, lambda t: {**t, name: np.zeros(shape, np.float32)})
    message = refused(hf.load_drafter, draft_folder)
    assert message.endswith(f"tensor {name} has shape {list(shape)}, expected {right}")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_no_number_is_refused(draft_folder, bad):
    def spoil(tensors):
        tensors["fc.weight"][1, 2] = bad
        return tensors

    edit_tensors(draft_folder, spoil)
    if np.isfinite(bad):  # but not in half precision
        hf.load_drafter(draft_folder)
    message = refused(functools.partial(hf.load_drafter, dtype=jnp.float16), draft_folder)
    assert "fc.weight: NaN or infinity in it" in message


def test_weights_of_another_head_are_refused(saved, tmp_path):
    for kind in ("gated", "rnn"):
        folder = shutil.copytree(saved / kind, tmp_path / kind)
        edit_config(folder, markov_head_type="vanilla")
        assert "expected a sequential head that has it" in refused(hf.load_drafter, folder)


def test_ids_of_a_pruned_drafter_that_is_said_to_be_none(draft_folder):
    edit_tensors(draft_folder, lambda t: {**t, "d2t": np.arange(4)})
    assert "expected both or neither" in refused(hf.load_drafter, draft_folder)
    edit_config(draft_folder, draft_vocab_size=20)
    assert "no draft_vocab_size below vocab_size" in refused(hf.load_drafter, draft_folder)


def test_extra_tensors_are_named_once_and_ignored(draft_folder, saved, caplog):
    extra = {name: np.zeros(2, np.float32) for name in ("new.b", "new.a")}
    inverse = {"layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32)}
    edit_tensors(draft_folder, lambda t: {**t, **extra, **inverse})
    with caplog.at_level(logging.WARNING):
        _, params = hf.load_drafter(draft_folder)
    same(params, hf.load_drafter(saved / "vanilla")[1])
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"{draft_folder}: ignoring unknown tensors new.a, new.b"]
