"""DSpark with a recurrent head for Qwen3-4B; the rest as in `qwen3_4b`."""

import dataclasses
from pathlib import Path

from configs import qwen3_4b

SETTINGS = dataclasses.replace(
    qwen3_4b.SETTINGS,
    workdir=Path("runs/qwen3_4b_rnn"),
    drafter=dataclasses.replace(qwen3_4b.SETTINGS.drafter, head="rnn"),
)
