"""Eagle3 for SmolLM2-135M-Instruct; data, taps and optimiser as in `smollm2`."""

import dataclasses
from pathlib import Path

from configs import smollm2, tiny_eagle3

SETTINGS = dataclasses.replace(
    smollm2.SETTINGS,
    workdir=Path("runs/smollm2_eagle3"),
    drafter=dataclasses.replace(
        tiny_eagle3.SETTINGS.drafter,
        target_layer_ids=smollm2.SETTINGS.drafter.target_layer_ids,
        num_anchors=smollm2.SETTINGS.drafter.num_anchors,
        draft_vocab_size=smollm2.SETTINGS.drafter.draft_vocab_size,
    ),
    loss=tiny_eagle3.SETTINGS.loss,
)
