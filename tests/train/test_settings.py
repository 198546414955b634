import dataclasses
import importlib
import json
import pkgutil
from pathlib import Path

import pytest

import configs
from dspark_jax.config import InputError, TargetConfig
from train.settings import DataSettings, DrafterSettings, Settings

PRESETS = sorted(m.name for m in pkgutil.iter_modules(configs.__path__))
QWEN3_LAYERS = {"4b": 36, "8b": 36, "14b": 40}


def settings_of(name: str) -> Settings:
    return importlib.import_module(f"configs.{name}").SETTINGS


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_has_a_workdir_of_its_name(name):
    assert settings_of(name).workdir == Path("runs") / name


@pytest.mark.parametrize("size", QWEN3_LAYERS)
def test_qwen3_presets_have_the_settings_of_the_reference(size):
    base, rnn, dflash = (settings_of(f"qwen3_{size}{x}") for x in ("", "_rnn", "_dflash"))
    layers = QWEN3_LAYERS[size]
    target = TargetConfig(151936, 128, 128, layers, 8, 2, 16)
    for settings in (base, rnn, dflash):
        cfg = settings.drafter.config(target)
        assert (cfg.num_layers, cfg.block_size, cfg.num_anchors) == (5, 7, 512)
        assert (cfg.mask_token_id, settings.loss.loss_decay) == (151669, 4.0)
        assert cfg.target_layer_ids == (
            (1, 10, 19, 28, 37) if size == "14b" else (1, 9, 17, 25, 33)
        )
        assert settings.optimizer.learning_rate == 6e-4
        assert (settings.data.max_length, settings.data.batch_size) == (4096, 512)
        assert settings.data.files == ()
    assert (base.drafter.head, base.drafter.markov_rank) == ("vanilla", 256)
    assert (rnn.drafter.head, rnn.drafter.markov_rank) == ("rnn", 256)
    assert (dflash.drafter.head, dflash.drafter.markov_rank) == ("none", 0)
    for settings, weights in ((base, (0.1, 0.9, 1.0)), (rnn, (0.1, 0.9, 1.0)), (dflash, (1, 0, 0))):
        loss = settings.loss
        assert (loss.ce_weight, loss.tv_weight, loss.confidence_weight) == weights
        assert settings.drafter.confidence_head == (weights[2] > 0)


def test_names_are_unique_and_json():
    names = [
        f.name
        for group in (Settings(), *vars(Settings()).values())
        if dataclasses.is_dataclass(group)
        for f in dataclasses.fields(group)
        if not dataclasses.is_dataclass(getattr(group, f.name))
    ]
    assert len(set(names)) == len(names)
    flat = Settings().flat()
    assert flat.keys() == set(names)
    assert json.loads(json.dumps(flat)) == flat


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: DataSettings(max_length=1), "max_length=1"),
        (lambda: DataSettings(batch_size=0), "batch_size=0"),
        (lambda: DrafterSettings(num_anchors=0), "num_anchors=0"),
        (lambda: Settings(seed=-1), "seed=-1"),
        (lambda: Settings(save_every=0), "save_every=0"),
    ],
)
def test_impossible_settings(make, named):
    with pytest.raises(InputError, match=named):
        make()
