"""Eagle3 for Qwen3-4B, which the paper compares with: seven steps, each of 0.8 the weight.

The reference learns from every position. So does this where documents have up to 1,024 tokens;
from longer ones it draws as many.
"""

import dataclasses
from pathlib import Path

from configs import qwen3_4b, tiny_eagle3

SETTINGS = dataclasses.replace(
    qwen3_4b.SETTINGS,
    workdir=Path("runs/qwen3_4b_eagle3"),
    drafter=dataclasses.replace(
        tiny_eagle3.SETTINGS.drafter,
        target_layer_ids=qwen3_4b.SETTINGS.drafter.target_layer_ids,
        num_anchors=1024,
    ),
    loss=tiny_eagle3.SETTINGS.loss,
)
