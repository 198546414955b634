"""Presets: each loads, and fits the target it names."""

import dataclasses
import functools
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import configs
from dspark_jax import params, sharding
from dspark_jax.config import Eagle3Config, RecurrentConfig, Rope, SlidingLayers, TargetConfig
from dspark_jax.generation import EMBEDDED
from dspark_jax.io import model_config
from dspark_jax.targets import dense
from scripts.memory_bound_pair import SMOLLM2
from train.prepare import step_config
from train.settings import Settings
from train.step import Batch, abstract_state, make_step

PRESETS = sorted(m.name for m in pkgutil.iter_modules(configs.__path__))
QWEN3 = {  # layers, width, query heads of the published models
    "Qwen/Qwen3-4B": (36, 2560, 32),
    "Qwen/Qwen3-8B": (36, 4096, 32),
    "Qwen/Qwen3-14B": (40, 5120, 40),
}


def test_all_are_there():
    sizes = ("qwen3_4b", "qwen3_8b", "qwen3_14b", "tiny")
    kinds = ("", "_dflash", "_rnn", "_eagle3")
    expected = {f"{size}{kind}" for size in sizes for kind in kinds} | {"tiny_mtp", "gemma4_12b"}
    expected |= {f"smollm2{kind}" for kind in (*kinds, "_mtp", "_small")}
    assert set(PRESETS) == expected


@pytest.mark.parametrize(
    "name", sorted(n for n in PRESETS if not n.startswith(("smollm2", "gemma4")))
)
def test_preset_fits_its_target(name):
    settings = importlib.import_module(f"configs.{name}").SETTINGS
    assert isinstance(settings, Settings)
    assert settings.workdir.name == name
    if settings.target not in QWEN3:
        target = model_config.load_target_config(EMBEDDED / "target")
    else:
        layers, width, heads = QWEN3[settings.target]
        target = TargetConfig(
            vocab_size=151_936,
            hidden_size=width,
            intermediate_size=4 * width,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads // 4,
            head_dim=128,
        )
    cfg = settings.drafter_config(target)
    if isinstance(cfg, RecurrentConfig):
        assert cfg.num_layers == 1
        assert not cfg.confidence_head
        if isinstance(cfg, Eagle3Config):
            assert cfg.block_size == 7
            assert len(cfg.target_layer_ids) == (5 if settings.target in QWEN3 else 3)
            assert cfg.step_loss_decay == 0.8
            assert settings.loss.soft_targets
        else:
            assert (cfg.block_size, cfg.target_layer_ids) == (1, ())
        return
    kind = "none" if name.endswith("_dflash") else "rnn" if name.endswith("_rnn") else "vanilla"
    assert cfg.head == kind
    assert cfg.block_size == 7
    assert cfg.confidence_head == (kind != "none")
    if settings.target in QWEN3:
        assert cfg.num_layers == 5
        assert cfg.markov_rank == (0 if kind == "none" else 256)
        assert settings.optimizer.learning_rate == 6e-4
        assert settings.data.batch_size == 512


def test_dflash_learns_from_the_text_alone():
    loss = importlib.import_module("configs.qwen3_4b_dflash").SETTINGS.loss
    assert (loss.ce_weight, loss.tv_weight, loss.confidence_weight) == (1.0, 0.0, 0.0)


def state_of_a_step(settings, target):
    """A whole training step at the sizes of the real target, lowered without its weights."""
    mesh = sharding.make_mesh(1)
    cfg = step_config(settings, target, settings.drafter.config(target))
    if settings.drafter.draft_vocab_size is not None:
        cfg = dataclasses.replace(cfg, draft_ids=tuple(range(settings.drafter.draft_vocab_size)))
    shape = (settings.data.batch_size, settings.data.max_length)
    batch = Batch(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, bool))
    stack = functools.partial(dense.stack_layers, cfg=target)
    stacked = jax.eval_shape(stack, params.abstract(dense.specs(target)))
    lowered = make_step(cfg, mesh).lower(abstract_state(cfg, mesh), stacked, batch)
    state, _ = lowered.out_info
    return state


def test_gemma4_12b_lowers():
    """The paper's numbers; the layers of the drafter are the target's that see everything."""
    settings = importlib.import_module("configs.gemma4_12b").SETTINGS
    target = TargetConfig(
        model_type="gemma4",
        vocab_size=262_144,
        hidden_size=3840,
        intermediate_size=15_360,
        num_layers=48,
        num_heads=16,
        num_kv_heads=1,
        head_dim=512,
        key_is_value=True,
        rope=Rope(1e6, "proportional", rotated_part=0.25),
        sliding=SlidingLayers(
            tuple(i for i in range(48) if i % 6 != 5), 1024, 8, 256, Rope(10_000.0)
        ),
        tie_embeddings=True,
        logit_softcap=30.0,
    )
    state = state_of_a_step(settings, target)
    drafter = settings.drafter
    assert (drafter.block_size, drafter.markov_rank, drafter.num_anchors) == (7, 256, 512)
    assert drafter.target_layer_ids == (5, 17, 29, 41, 46)
    assert drafter.mask_token_id == 4
    assert len(state.params.layers) == 5
    assert state.params.layers[0].qkv.shape == (3840, 1, 17, 512)
    assert state.params.head.w2.shape == (256, 262_144)
    assert settings.workdir.name == "gemma4_12b"


def test_smollm2_lowers():
    settings = importlib.import_module("configs.smollm2").SETTINGS
    target = dataclasses.replace(SMOLLM2, tie_embeddings=True)
    state = state_of_a_step(settings, target)
    assert state.params.head.w1.shape == (49_152, 64)
    layer = 576 * (9 + 2 * 3) * 64 + 576 * 576 + 3 * 576 * 1536 + 2 * 576 + 2 * 64
    heads = (49_152 + 8_192) * 64 + 576 + 64 + 1
    assert params.count(state.params) == 5 * 576 * 576 + 2 * layer + 2 * 576 + heads
