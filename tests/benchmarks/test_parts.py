"""Which weights a round reads, counted by hand, and drafters side by side."""

import jax
import pytest

from benchmarks import parts
from dspark_jax import params
from dspark_jax.config import Eagle3Config, InputError, MtpConfig
from dspark_jax.drafters import recurrent
from dspark_jax.generation import EMBEDDED
from dspark_jax.io import hf
from dspark_jax.vocabulary import Vocabulary

LAYER = 16 * (2 + 2) * 8 + 16 * 16 + 3 * 16 * 24 + 2 * 16 + 2 * 8
"""Numbers of a layer of the tiny pair: q, k and v, output, MLP, two norms, and two of heads."""
LM_HEAD = 16 * 32
BACKBONE = LAYER + 16


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("vanilla", 3 * LM_HEAD),
        ("gated", 3 * (LM_HEAD + 16 * 16) + 16 * 16),
        ("rnn", 3 * (LM_HEAD + 32 * 48) + 16 * 48),
    ],
)
def test_weights_of_a_sequential_head(tiny_pair, kind, numbers):
    assert parts.weight_bytes(tiny_pair(kind), 3) == {
        "verify": 4 * (2 * LAYER + 16 + LM_HEAD),
        "backbone": 4 * BACKBONE,
        "lm_head": 4 * LM_HEAD,
        "head": 4 * numbers,
    }


def test_weights_without_a_head(tiny_pair):
    models = tiny_pair("none")
    pruned = models.drafter.replace(vocabulary=Vocabulary(None, models.target.lm_head[:, :5]))
    found = parts.weight_bytes(models.replace(drafter=pruned), 3)
    assert found["lm_head"] == 4 * 16 * 5
    assert "head" not in found
    plain = parts.weight_bytes(models.replace(drafter=None), 0)
    assert plain == {"verify": found["verify"]}


@pytest.mark.parametrize(
    ("kind", "taps", "numbers"),
    [
        (Eagle3Config, (-1, 0), LAYER + 16 * (2 + 2) * 8 + 2 * 16),  # q, k and v read 2 D
        (MtpConfig, (), LAYER + 32 * 16 + 3 * 16),
    ],
)
def test_a_drafter_of_one_token_reads_its_weights_at_each(tiny_pair, kind, taps, numbers):
    models, size = tiny_pair("none"), 1 if kind is MtpConfig else 3
    cfg = kind.for_target(
        models.target_config, num_layers=1, block_size=size, target_layer_ids=taps
    )
    drafter = params.init(jax.random.key(0), recurrent.specs(cfg))
    found = parts.weight_bytes(models.replace(drafter=drafter, drafter_config=cfg), size)
    assert found["backbone"] == 4 * size * numbers
    assert found["lm_head"] == 4 * size * LM_HEAD


def test_systems_by_name_and_block(tmp_path):
    folders = [tmp_path / name / "drafter" for name in ("one", "two")]
    for folder in folders:
        folder.parent.mkdir()
        folder.symlink_to(EMBEDDED / "drafter")
    trained = hf.load_drafter(folders[0])[0].block_size
    plain, pairs = parts.load_systems(EMBEDDED / "target", folders, (1, 3, 99), "float32")
    assert list(pairs) == [f"{name}, block {k}" for name in ("one", "two") for k in (1, 3)]
    assert pairs["two, block 3"].models.drafter_config.block_size == 3
    assert all(pair.models.target is plain.models.target for pair in pairs.values())
    assert plain.models.drafter is None
    _, pairs = parts.load_systems(EMBEDDED / "target", folders[:1], (99,), "float32")
    assert list(pairs) == [f"drafter, block {trained}"]
    with pytest.raises(InputError, match="--draft: expected different folders"):
        parts.load_systems(EMBEDDED / "target", folders[:1] * 2, (), "float32")


@pytest.mark.parametrize("numbers", [(), (0,), (3, -1)])
def test_numbers_that_are_not_above_zero(numbers):
    with pytest.raises(InputError, match=r"^--rows.*: expected whole numbers above 0"):
        parts.check_settings({"--repeats": [1], "--rows": numbers}, None)


def test_figures_that_cannot_be_written(tmp_path):
    parts.check_settings({"--rows": [1]}, tmp_path / "figures.json")
    with pytest.raises(InputError, match=r"--json .*: no such folder"):
        parts.check_settings({}, tmp_path / "none" / "figures.json")
