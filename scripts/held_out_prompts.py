"""Writes prompts from the held-out files of the standard library, for measuring accepted length.

    python scripts/held_out_prompts.py --output prompts.jsonl

Each prompt is a piece of about 160 characters that starts at a line; places are drawn by seed.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import tyro

from train import corpus


@dataclasses.dataclass(frozen=True)
class Settings:
    """Writes prompts from held-out files."""

    output: Path
    """JSONL file with a `prompt` a line."""
    prompts: int = 128
    characters: int = 160
    seed: int = 0


def main(settings: Settings) -> None:
    rng = np.random.default_rng(settings.seed)
    texts = corpus.stdlib_texts(held_out=True)
    with open(settings.output, "w", encoding="utf-8") as file:
        for number in range(settings.prompts):
            text = texts[number % len(texts)]
            start = text.rindex("\n", 0, rng.integers(2, len(text) - settings.characters)) + 1
            # A lone space or line break at the end would be a token that text never has there.
            prompt = text[start : start + settings.characters].rstrip()
            print(json.dumps({"id": number, "prompt": prompt}), file=file)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
