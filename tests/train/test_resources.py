import dataclasses

import jax
import pytest

from dspark_jax.config import (
    DrafterConfig,
    Eagle3Config,
    MtpConfig,
    Rope,
    SlidingLayers,
    TargetConfig,
)
from dspark_jax.losses import LossConfig
from train.resources import PEAK_FLOPS, peak_flops, peak_memory, step_flops
from train.settings import OptimizerSettings
from train.step import StepConfig

TARGET = TargetConfig(
    vocab_size=100, hidden_size=8, intermediate_size=12, num_layers=3, num_heads=2,
    num_kv_heads=1, head_dim=6,
)  # fmt: skip


@pytest.mark.parametrize(
    ("head", "sequential"),
    # The rnn has one matrix more, of state, token and hidden state to three outputs.
    [("none", 0), ("vanilla", 3 * 100), ("rnn", 3 * 100 + (2 * 3 + 8) * 9)],
)
def test_operations_of_a_step_by_hand(head, sequential):
    """B = 2 rows of S = 10 tokens, A = 5 blocks of K = 4."""
    rank = 0 if head == "none" else 3
    drafter = DrafterConfig.for_target(
        TARGET, num_layers=2, block_size=4, mask_token_id=1, target_layer_ids=(0, 1), head=head,
        markov_rank=rank, confidence_head=False, num_anchors=5,
    )  # fmt: skip
    layer = 8 * (2 + 2) * 6 + 12 * 8 + 3 * 8 * 12  # q, k, v; out; gate, up, down
    pairs = 2 * 2 * 6  # score and sum of a query and a key, in two heads of six
    target = 10 * 3 * layer + 55 * 3 * pairs + 20 * 8 * 100
    context = 10 * (2 * 16 * 8 + 3 * 2 * (8 * 2 * 6))
    blocks = 20 * 3 * 2 * (layer + (5 + 4) * pairs)
    logits = 20 * (2 * 8 * 100 + 3 * sequential)
    cfg = StepConfig(TARGET, drafter, LossConfig(1, 0, 0), OptimizerSettings())
    assert step_flops(cfg, 2, 10) == 2 * 2 * (target + context + blocks + logits)
    # Two documents of 5 tokens in each row.
    target += (2 * 15 - 55) * 3 * pairs + 20 * 8 * 100
    blocks = 2 * 20 * 3 * 2 * (layer + (2.5 + 4) * pairs)
    shared = dataclasses.replace(cfg, documents_per_row=2)
    assert step_flops(shared, 2, 10) == 2 * 2 * (target + context + blocks + 2 * logits)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_operations_of_recurrent_drafters_by_hand(kind):
    """B = 2 rows of S = 10 tokens, A = 5 blocks; 30 of the 100 tokens can be drafted."""
    layer = 8 * (2 + 2) * 6 + 12 * 8 + 3 * 8 * 12
    keys_values, pairs = 2 * 6 * 8, 2 * 2 * 6
    shared = {"num_layers": 1, "num_anchors": 5, "draft_vocab_size": 30}
    if kind == "eagle3":  # q, k and v read twice the width
        drafter = Eagle3Config.for_target(TARGET, block_size=4, target_layer_ids=(0, 1), **shared)
        slots, seen, slot = 20, 5 + 4, layer + 8 * (2 + 2) * 6
        context = 10 * (2 * 16 * 8 + 3 * 2 * keys_values)
    else:  # two vectors are joined to one in front of the layer, in the context as well
        drafter = MtpConfig.for_target(TARGET, **shared)
        slots, seen, slot = 5, 5 + 1, layer + 16 * 8
        context = 10 * 3 * (keys_values + 16 * 8)
    target = 10 * 3 * layer + 55 * 3 * pairs + slots * 8 * 100
    blocks = slots * 3 * (slot + seen * pairs) + slots * 2 * 8 * 30
    cfg = StepConfig(TARGET, drafter, LossConfig(1, 0, 0), OptimizerSettings())
    assert step_flops(cfg, 2, 10) == 2 * 2 * (target + context + blocks)


def test_operations_of_layers_that_see_a_window():
    """Rows of 10 tokens; two layers see 4 positions and have heads of their own size."""
    target = dataclasses.replace(
        TARGET, model_type="gemma4", key_is_value=True,
        sliding=SlidingLayers((0, 2), 4, 1, 2, Rope()),
    )  # fmt: skip
    drafter = DrafterConfig.for_target(
        target, num_layers=1, block_size=4, mask_token_id=1, target_layer_ids=(0,), head="none",
        markov_rank=0, confidence_head=False, num_anchors=5,
    )  # fmt: skip
    near = 8 * (2 + 2) * 2 + 4 * 8 + 3 * 8 * 12
    full = 8 * (2 + 1) * 6 + 12 * 8 + 3 * 8 * 12  # the key is the value
    seen = 1 + 2 + 3 + 7 * 4
    frozen = 10 * (2 * near + full) + 2 * seen * 2 * 2 * 2 + 55 * 2 * 2 * 6 + 20 * 8 * 100
    trained = 10 * (2 * 8 * 8 + 3 * 8 * 6) + 20 * 3 * (full + (5 + 4) * 24) + 20 * 2 * 8 * 100
    cfg = StepConfig(target, drafter, LossConfig(1, 0, 0), OptimizerSettings())
    assert step_flops(cfg, 2, 10) == 2 * 2 * (frozen + trained)


def test_peak_of_devices():
    devices = jax.devices()[:2]
    assert peak_flops(devices, None) is None  # a CPU
    assert peak_flops(devices, 1e12) == 2e12
    assert all(1e13 < value < 1e16 for value in PEAK_FLOPS.values())


def test_memory_in_use_is_that_of_this_process():
    """Where devices do not tell: some hundred megabytes, with JAX in it."""
    assert 5e7 < peak_memory() < 1e12
