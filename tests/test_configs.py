"""Presets: each loads, and fits the target it names."""

import importlib
import pkgutil

import pytest

import configs
from dspark_jax.config import TargetConfig
from train.settings import Settings

PRESETS = sorted(m.name for m in pkgutil.iter_modules(configs.__path__))
QWEN3 = {  # layers, width, query heads of the published models
    "Qwen/Qwen3-4B": (36, 2560, 32),
    "Qwen/Qwen3-8B": (36, 4096, 32),
    "Qwen/Qwen3-14B": (40, 5120, 40),
}


def test_all_are_there():
    sizes = ("qwen3_4b", "qwen3_8b", "qwen3_14b", "tiny")
    expected = {f"{size}{kind}" for size in sizes for kind in ("", "_dflash", "_rnn")}
    assert set(PRESETS) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_preset_fits_its_target(name):
    settings = importlib.import_module(f"configs.{name}").SETTINGS
    assert isinstance(settings, Settings)
    assert settings.workdir.name == name
    layers, width, heads = QWEN3.get(settings.target, (6, 128, 4))
    target = TargetConfig(
        vocab_size=151_936 if settings.target in QWEN3 else 1024,
        hidden_size=width,
        intermediate_size=4 * width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads // 4,
        head_dim=128,
    )
    cfg = settings.drafter.config(target)
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
