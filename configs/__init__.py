"""Presets of `train.main`: each module holds `SETTINGS`."""
