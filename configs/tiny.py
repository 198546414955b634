"""The default: a drafter for the embedded target, in about two minutes on two CPU cores."""

from train.settings import DataSettings, DrafterSettings, OptimizerSettings, Settings

SETTINGS = Settings(
    # Layers of the target have seen more text than a drafter sees in minutes.
    start="target",
    drafter=DrafterSettings(num_layers=3, block_size=7, head="vanilla", markov_rank=64),
    # Sources are longer than rows: there is next to nothing to pack.
    data=DataSettings(documents_per_row=1),
    # Muon reaches in minutes what AdamW, the default of the other presets, takes far longer for.
    optimizer=OptimizerSettings(algorithm="muon", steps=400, learning_rate=6e-3),
)
