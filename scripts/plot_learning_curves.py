"""Draws the expected accepted length of training runs over their steps.

python scripts/plot_learning_curves.py --workdirs runs/tiny runs/tiny_rnn --output curves.png
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.config import InputError, require
from dspark_jax.io import cli
from infer import pictures


@dataclasses.dataclass(frozen=True)
class Settings:
    """Draws learning curves."""

    workdirs: tuple[Path, ...]
    """Folders of training runs."""
    output: Path
    """PNG file; one for a dark page, FILE-dark.png, is put beside it."""
    smooth: int = 5
    """Lines of metrics that a point is the mean of."""


def plot(figure: Any, settings: Settings) -> None:
    """A line a run."""
    figure.set_size_inches(7, 4.4)
    axis = figure.subplots()
    for workdir in settings.workdirs:
        path = workdir / "metrics.jsonl"
        require(path.is_file(), f"{path}: no such file, expected the metrics of a run")
        try:
            records = [json.loads(line) for line in path.read_text().splitlines()]
        except ValueError as error:
            raise InputError(f"{path}: not lines of JSON ({error})") from error
        require(
            0 < settings.smooth <= len(records),
            f"--smooth {settings.smooth}: expected 1 to the {len(records)} lines of {path}",
        )
        kernel = np.ones(settings.smooth) / settings.smooth
        steps, lengths = (
            np.convolve([r[name] for r in records], kernel, mode="valid")
            for name in ("step", "expected_accepted_length")
        )
        axis.plot(steps, lengths, label=workdir.name, marker="")
    axis.set(xlabel="step", ylabel="expected accepted length at temperature 1")
    pictures.below(figure, axis)


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="plot_learning_curves", description=__doc__ or "")
    require(len(settings.workdirs) > 0, "--workdirs: expected folders of runs")
    pictures.check(settings.output, "--output")
    pictures.save(settings.output, lambda figure: plot(figure, settings))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
