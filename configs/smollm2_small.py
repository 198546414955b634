"""DSpark for SmolLM2-135M-Instruct in 13 MB, the drafter inside the package; data as in `smollm2`.

Half of the layers, rank and block of `smollm2`, and twice the anchors: in an hour on two cores it
learns as much from a step, and a step takes no longer.
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
