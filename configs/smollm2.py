"""DSpark with a Markov head for SmolLM2-135M-Instruct, a real model for a laptop.

`python scripts/fetch_smollm2.py` puts the target where it is looked for here. Wants `--files` with
conversations whose answers the target has written.
"""

from pathlib import Path

from dspark_jax.losses import LossConfig
from train.settings import (
    ComputeSettings,
    DataSettings,
    DrafterSettings,
    OptimizerSettings,
    Settings,
)

SETTINGS = Settings(
    workdir=Path("runs/smollm2"),
    target="runs/models/SmolLM2-135M-Instruct.Q4_1.gguf",
    # Layers of the target are no help here: after 60 steps of 4 x 96 tokens of source text the
    # expected accepted length was 1.24 from them, and 1.35 from random values.
    start="random",
    drafter=DrafterSettings(
        # The whole LM head is as large as eight layers of the drafter, and would be most of what a
        # draft costs.
        num_layers=2,
        draft_vocab_size=8_192,
        block_size=5,
        head="vanilla",
        markov_rank=64,
        # From the second layer to the third last, evenly.
        target_layer_ids=(1, 8, 14, 21, 27),
        # <empty_output>: its embedding equals, but for quantisation, those of ten other tokens for
        # parts of notebooks and issues. None was ever trained: the target emits none of them.
        mask_token_id=16,
        num_anchors=16,
    ),
    data=DataSettings(files=(), max_length=512, batch_size=8),
    loss=LossConfig(ce_weight=0.1, tv_weight=0.9, confidence_weight=1.0, loss_decay=4.0),
    optimizer=OptimizerSettings(algorithm="muon", steps=2_000, learning_rate=6e-3),
    # 16 anchors of 4 sequences are 320 slots: the logits of the target for them are 63 MB.
    compute=ComputeSettings(anchor_chunk=16, microbatches=2),
)
