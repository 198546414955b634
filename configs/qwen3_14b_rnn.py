"""DSpark with a recurrent head for Qwen3-14B; the rest as in `qwen3_14b`."""

import dataclasses
from pathlib import Path

from configs import qwen3_14b

SETTINGS = dataclasses.replace(
    qwen3_14b.SETTINGS,
    workdir=Path("runs/qwen3_14b_rnn"),
    drafter=dataclasses.replace(qwen3_14b.SETTINGS.drafter, head="rnn"),
)
