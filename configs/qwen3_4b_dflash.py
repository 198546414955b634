"""DFlash for Qwen3-4B: no sequential head, no confidence head, cross-entropy alone."""

import dataclasses
from pathlib import Path

from configs import qwen3_4b

SETTINGS = dataclasses.replace(
    qwen3_4b.SETTINGS,
    workdir=Path("runs/qwen3_4b_dflash"),
    drafter=dataclasses.replace(
        qwen3_4b.SETTINGS.drafter,
        head="none",
        markov_rank=0,
        confidence_head=False,
        confidence_with_markov=False,
    ),
    # The decay of 4 is that of the released checkpoints.
    loss=dataclasses.replace(
        qwen3_4b.SETTINGS.loss, ce_weight=1.0, tv_weight=0.0, confidence_weight=0.0
    ),
)
