"""DSpark with a recurrent head for the embedded target; the rest as in `tiny`."""

import dataclasses
from pathlib import Path

from configs import tiny

SETTINGS = dataclasses.replace(
    tiny.SETTINGS,
    workdir=Path("runs/tiny_rnn"),
    drafter=dataclasses.replace(tiny.SETTINGS.drafter, head="rnn"),
)
