"""DSpark with a recurrent head for Qwen3-8B; the rest as in `qwen3_8b`."""

import dataclasses
from pathlib import Path

from configs import qwen3_8b

SETTINGS = dataclasses.replace(
    qwen3_8b.SETTINGS,
    workdir=Path("runs/qwen3_8b_rnn"),
    drafter=dataclasses.replace(qwen3_8b.SETTINGS.drafter, head="rnn"),
)
