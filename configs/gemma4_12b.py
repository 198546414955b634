"""DSpark with a Markov head for Gemma4-12B: as `qwen3_4b` but for taps and mask token."""

import dataclasses
from pathlib import Path

from configs import qwen3_4b

SETTINGS = dataclasses.replace(
    qwen3_4b.SETTINGS,
    workdir=Path("runs/gemma4_12b"),
    target="google/gemma-4-12B-it",
    drafter=dataclasses.replace(
        qwen3_4b.SETTINGS.drafter,
        # All but the last are layers that see all that is before; the model has 48.
        target_layer_ids=(5, 17, 29, 41, 46),
        mask_token_id=4,
    ),
)
