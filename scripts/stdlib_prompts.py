"""Prompts from the standard library's sources, for the embedded target.

    python scripts/stdlib_prompts.py --output runs/held_out.jsonl
    python scripts/stdlib_prompts.py --part training --prompts 8192 --characters 48 \\
        --output runs/prompts.jsonl

Those from held-out files are for measuring, as many from each; those from training files are for
`infer.generate` to answer, from anywhere in the text. Each is a piece that starts at a line.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from dspark_jax.config import require
from dspark_jax.io import cli
from infer import results
from train import corpus


@dataclasses.dataclass(frozen=True)
class Settings:
    """Writes prompts from the standard library's sources."""

    output: Path
    """JSONL file with a `prompt` a line."""
    part: Literal["held_out", "training"] = "held_out"
    prompts: int = 128
    characters: int = 160
    """Most of a prompt."""
    seed: int = 0

    def __post_init__(self):
        for option, number in (("--prompts", self.prompts), ("--characters", self.characters)):
            require(number > 0, f"{option} {number}: expected a whole number above 0")
        require(self.seed >= 0, f"--seed {self.seed}: expected a whole number from 0 on")
        results.check_place(self.output, "--output")


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="stdlib_prompts", description=__doc__ or "")
    rng = np.random.default_rng(settings.seed)
    held_out = settings.part == "held_out"
    texts = corpus.stdlib_texts(held_out=held_out)
    texts = [text for text in texts if len(text) > 2 + settings.characters]
    sizes = np.array([len(text) for text in texts])
    require(len(texts) > 0, f"--characters {settings.characters}: no source is as long")
    with open(settings.output, "w", encoding="utf-8") as file:
        for number in range(settings.prompts):
            which = (
                number % len(texts) if held_out else rng.choice(len(texts), p=sizes / sizes.sum())
            )
            text = texts[which]
            start = text.rfind("\n", 0, rng.integers(2, len(text) - settings.characters)) + 1
            # A lone space or line break at the end would be a token that text never has there.
            prompt = text[start : start + settings.characters].rstrip()
            if prompt:
                print(json.dumps({"id": number, "prompt": prompt}), file=file)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
