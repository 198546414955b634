"""The default: a drafter for the embedded target, in about two minutes on two CPU cores."""

from train.settings import DrafterSettings, OptimizerSettings, Settings

SETTINGS = Settings(
    drafter=DrafterSettings(num_layers=2, block_size=7, head="vanilla", markov_rank=64),
    # Muon reaches in minutes what AdamW, the default of the other presets, takes far longer for.
    optimizer=OptimizerSettings(algorithm="muon", steps=400, learning_rate=8e-3),
)
