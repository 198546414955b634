"""DSpark with a Markov head for Qwen3-4B, with the settings of the reference.

Wants `--files` with conversations whose answers the target has written; ten epochs of N of them
are 10 * N / 512 steps. One step at a time fits 8 accelerators with a sequence each.
"""

from pathlib import Path

from dspark_jax.losses import LossConfig
from train.settings import (
    ComputeSettings,
    DataSettings,
    DrafterSettings,
    OptimizerSettings,
    Settings,
)

SETTINGS = Settings(
    workdir=Path("runs/qwen3_4b"),
    target="Qwen/Qwen3-4B",
    drafter=DrafterSettings(
        num_layers=5,
        block_size=7,
        head="vanilla",
        markov_rank=256,
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=151669,
        num_anchors=512,
    ),
    data=DataSettings(files=(), max_length=4096, batch_size=512),
    # The paper writes a decay of the block length, 7; the released checkpoints used 4, as here.
    loss=LossConfig(ce_weight=0.1, tv_weight=0.9, confidence_weight=1.0, loss_decay=4.0),
    optimizer=OptimizerSettings(
        steps=20_000, learning_rate=6e-4, warmup_fraction=0.04, weight_decay=0.0, clip_norm=1.0
    ),
    compute=ComputeSettings(dtype="bfloat16", anchor_chunk=32, microbatches=64),
)
