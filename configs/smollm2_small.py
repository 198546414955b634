"""DSpark for SmolLM2-135M-Instruct in 13 MB (`train.export --lean --dtype bfloat16`).

Half of the layers and of the rank of `smollm2`, blocks of four, and twice the anchors; data as
there.
"""

import dataclasses
from pathlib import Path

from configs import smollm2

SETTINGS = dataclasses.replace(
    smollm2.SETTINGS,
    workdir=Path("runs/smollm2_small"),
    drafter=dataclasses.replace(
        smollm2.SETTINGS.drafter,
        num_layers=1,
        block_size=4,
        markov_rank=32,
        target_layer_ids=(1, 14, 27),
        num_anchors=32,
    ),
    optimizer=dataclasses.replace(smollm2.SETTINGS.optimizer, steps=700),
    compute=dataclasses.replace(smollm2.SETTINGS.compute, anchor_chunk=32, microbatches=4),
)
