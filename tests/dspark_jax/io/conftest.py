"""Folders of a small target and its drafters, and what the tests do with them."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.config import DrafterConfig, InputError, Rope, SlidingLayers, TargetConfig
from dspark_jax.drafters import dspark
from dspark_jax.io import hf
from dspark_jax.targets import dense

TARGET = TargetConfig(
    vocab_size=20,
    hidden_size=12,
    intermediate_size=10,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rope=Rope(theta=5e5),
    max_position=128,
    stop_token_ids=(1, 7),
)
LLAMA = dataclasses.replace(
    TARGET,
    model_type="llama",
    tie_embeddings=True,
    rope=Rope(5e5, "llama3", 8.0, 1.0, 4.0, original_max_position=32),
    norm_eps=1e-5,
)
GEMMA4 = dataclasses.replace(
    TARGET,
    model_type="gemma4",
    key_is_value=True,
    tie_embeddings=True,
    num_kv_heads=1,
    head_dim=8,
    rope=Rope(1e6, "proportional", rotated_part=0.5),
    sliding=SlidingLayers((0, 1), 4, 2, 6, Rope(1e4)),
    logit_softcap=30.0,
)
DRAFT = DrafterConfig.for_target(
    TARGET,
    num_layers=2,
    block_size=4,
    mask_token_id=19,
    target_layer_ids=(-1, 1),
    markov_rank=5,
    num_anchors=16,
)
GEMMA4_DRAFT = DrafterConfig.for_target(
    GEMMA4,
    num_layers=2,
    block_size=4,
    mask_token_id=4,
    target_layer_ids=(0, 1),
    markov_rank=5,
    num_anchors=16,
)
NO_CONFIDENCE = {"confidence_head": False, "confidence_with_markov": False}
DRAFTS = {
    "vanilla": DRAFT,
    "gated": dataclasses.replace(DRAFT, head="gated"),
    "rnn": dataclasses.replace(DRAFT, head="rnn", confidence_with_markov=False),
    "none": dataclasses.replace(DRAFT, head="none", markov_rank=0, **NO_CONFIDENCE),
}
LOADERS = pytest.mark.parametrize("load", [hf.load_target, hf.load_drafter])


def random_like(specs, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), dtype), specs)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)

    def check(x, y):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)

    jax.tree.map(check, a, b)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Folders with a target and one drafter of each head."""
    root = tmp_path_factory.mktemp("hf")
    target = TARGET, random_like(dense.specs(TARGET))
    hf.save_target(root / "target", *target)
    for name, cfg in DRAFTS.items():
        hf.save_drafter(root / name, cfg, random_like(dspark.specs(cfg)), target=target)
    gemma4 = GEMMA4, random_like(dense.specs(GEMMA4))
    hf.save_target(root / "gemma4_target", *gemma4)
    drafter = random_like(dspark.specs(GEMMA4_DRAFT))
    hf.save_drafter(root / "gemma4", GEMMA4_DRAFT, drafter, target=gemma4)
    return root


@pytest.fixture
def target_folder(saved, tmp_path):
    return shutil.copytree(saved / "target", tmp_path / "target")


@pytest.fixture
def draft_folder(saved, tmp_path):
    return shutil.copytree(saved / "vanilla", tmp_path / "draft")


def edit_config(folder, *, drop=(), **changes):
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in drop}))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def refused(load, folder) -> str:
    """The message of the `InputError` that loading raises: one line that names the folder."""
    with pytest.raises(InputError) as error:
        load(folder)
    message = str(error.value)
    assert "\n" not in message
    assert str(folder) in message
    return message
