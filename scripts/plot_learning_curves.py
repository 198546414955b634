"""Draws the expected accepted length of training runs over their steps.

python scripts/plot_learning_curves.py --workdirs runs/tiny runs/tiny_rnn --output curves.png
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tyro


@dataclasses.dataclass(frozen=True)
class Settings:
    """Draws learning curves."""

    workdirs: tuple[Path, ...]
    """Folders of training runs."""
    output: Path
    """PNG file."""
    smooth: int = 5
    """Lines of metrics that a point is the mean of."""


def main(settings: Settings) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for workdir in settings.workdirs:
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        kernel = np.ones(settings.smooth) / settings.smooth
        steps, lengths = (
            np.convolve([r[name] for r in records], kernel, mode="valid")
            for name in ("step", "expected_accepted_length")
        )
        axes.plot(steps, lengths, label=workdir.name)
    axes.set(xlabel="step", ylabel="expected accepted length at temperature 1")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(settings.output, dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
