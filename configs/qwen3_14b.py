"""DSpark with a Markov head for Qwen3-14B: as `qwen3_4b` but for the taps, as it has 40 layers."""

import dataclasses
from pathlib import Path

from configs import qwen3_4b

SETTINGS = dataclasses.replace(
    qwen3_4b.SETTINGS,
    workdir=Path("runs/qwen3_14b"),
    target="Qwen/Qwen3-14B",
    drafter=dataclasses.replace(qwen3_4b.SETTINGS.drafter, target_layer_ids=(1, 10, 19, 28, 37)),
)
