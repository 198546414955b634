"""MTP-1 for the embedded target: a block of the target's kind that drafts one token a round."""

import dataclasses
from pathlib import Path

from configs import tiny

SETTINGS = dataclasses.replace(
    tiny.SETTINGS,
    workdir=Path("runs/tiny_mtp"),
    drafter=dataclasses.replace(
        tiny.SETTINGS.drafter,
        kind="mtp",
        num_layers=1,
        block_size=1,
        head="none",
        markov_rank=0,
        confidence_head=False,
        confidence_with_markov=False,
        target_layer_ids=(),
        # As many tokens to learn from as with blocks of seven.
        num_anchors=7 * tiny.SETTINGS.drafter.num_anchors,
    ),
    loss=dataclasses.replace(
        tiny.SETTINGS.loss, ce_weight=1.0, tv_weight=0.0, confidence_weight=0.0
    ),
)
