"""MTP-1 for SmolLM2-135M-Instruct; data and optimiser as in `smollm2`."""

import dataclasses
from pathlib import Path

from configs import smollm2, tiny_mtp

SETTINGS = dataclasses.replace(
    smollm2.SETTINGS,
    workdir=Path("runs/smollm2_mtp"),
    # As many tokens to learn from as with blocks of five.
    drafter=dataclasses.replace(
        tiny_mtp.SETTINGS.drafter,
        num_anchors=5 * smollm2.SETTINGS.drafter.num_anchors,
        draft_vocab_size=smollm2.SETTINGS.drafter.draft_vocab_size,
    ),
    loss=tiny_mtp.SETTINGS.loss,
    compute=dataclasses.replace(smollm2.SETTINGS.compute, anchor_chunk=80),
)
