"""Eagle3 for the embedded target: a layer that drafts a token at a time, learning from its own."""

import dataclasses
from pathlib import Path

from configs import tiny

SETTINGS = dataclasses.replace(
    tiny.SETTINGS,
    workdir=Path("runs/tiny_eagle3"),
    drafter=dataclasses.replace(
        tiny.SETTINGS.drafter,
        kind="eagle3",
        num_layers=1,
        block_size=7,
        head="none",
        markov_rank=0,
        confidence_head=False,
        confidence_with_markov=False,
        target_layer_ids=(0, 1, 2),
    ),
    # Each step weighs 0.8 of the one before: exp(-1 / 4.48142).
    loss=dataclasses.replace(
        tiny.SETTINGS.loss,
        ce_weight=1.0,
        tv_weight=0.0,
        confidence_weight=0.0,
        loss_decay=4.48142,
        soft_targets=True,
    ),
)
