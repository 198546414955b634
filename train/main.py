"""Trains a drafter.

    python -m train.main [PRESET] [--setting value ...]

Without a preset it is `tiny`: a drafter for the small target that comes with the package. Writes
checkpoints, metrics.jsonl, TensorBoard events, config.json and at the end the exported drafter
under --workdir; started again with the same settings it goes on where it was, on whatever devices.
SIGTERM and SIGINT save what there is and end it with exit code 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from safetensors import SafetensorError

from dspark_jax.io import cli
from train import hosts
from train.lookout import Diverged
from train.prepare import prepare
from train.presets import parse_arguments
from train.settings import Settings


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = parse_arguments(args, prog="train.main", description=__doc__ or "")
    try:
        return train(settings)
    except (OSError, SafetensorError, Diverged) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def train(settings: Settings) -> int:
    """A whole run, or the rest of one, up to a signal."""
    hosts.join(settings.hosts)
    hosts.require_same(settings.shared())
    with cli.stop_signals() as stopped:
        run = prepare(settings)
        if run.loop(stopped):
            run.export()
        return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
