"""DSpark with a recurrent head for SmolLM2-135M-Instruct; the rest as in `smollm2`."""

import dataclasses
from pathlib import Path

from configs import smollm2

SETTINGS = dataclasses.replace(
    smollm2.SETTINGS,
    workdir=Path("runs/smollm2_rnn"),
    drafter=dataclasses.replace(smollm2.SETTINGS.drafter, head="rnn"),
)
