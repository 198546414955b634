"""DSpark with a Markov head for Qwen3-8B: as `qwen3_4b`, taps and all."""

import dataclasses
from pathlib import Path

from configs import qwen3_4b

SETTINGS = dataclasses.replace(
    qwen3_4b.SETTINGS,
    workdir=Path("runs/qwen3_8b"),
    target="Qwen/Qwen3-8B",
)
