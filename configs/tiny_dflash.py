"""DFlash for the embedded target: no sequential head, no confidence head, cross-entropy alone."""

import dataclasses
from pathlib import Path

from configs import tiny

SETTINGS = dataclasses.replace(
    tiny.SETTINGS,
    workdir=Path("runs/tiny_dflash"),
    drafter=dataclasses.replace(
        tiny.SETTINGS.drafter,
        head="none",
        markov_rank=0,
        confidence_head=False,
        confidence_with_markov=False,
    ),
    loss=dataclasses.replace(
        tiny.SETTINGS.loss, ce_weight=1.0, tv_weight=0.0, confidence_weight=0.0
    ),
)
