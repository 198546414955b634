"""The default: a drafter for the embedded target, in about two minutes on two CPU cores."""

from train.settings import Settings

SETTINGS = Settings()
