"""Eagle3 for Qwen3-8B: as `qwen3_4b_eagle3`, with the taps of `qwen3_8b`."""

import dataclasses
from pathlib import Path

from configs import qwen3_4b_eagle3, qwen3_8b

SETTINGS = dataclasses.replace(
    qwen3_4b_eagle3.SETTINGS,
    workdir=Path("runs/qwen3_8b_eagle3"),
    target=qwen3_8b.SETTINGS.target,
    drafter=dataclasses.replace(
        qwen3_4b_eagle3.SETTINGS.drafter,
        target_layer_ids=qwen3_8b.SETTINGS.drafter.target_layer_ids,
    ),
)
