"""DFlash for SmolLM2-135M-Instruct: no sequential head, no confidence head, cross-entropy alone."""

import dataclasses
from pathlib import Path

from configs import smollm2, tiny_dflash

SETTINGS = dataclasses.replace(
    smollm2.SETTINGS,
    workdir=Path("runs/smollm2_dflash"),
    drafter=dataclasses.replace(
        smollm2.SETTINGS.drafter,
        head="none",
        markov_rank=0,
        confidence_head=False,
        confidence_with_markov=False,
    ),
    loss=tiny_dflash.SETTINGS.loss,
)
