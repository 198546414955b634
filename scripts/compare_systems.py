"""Trains drafters of all kinds alike, and measures them on the same prompts.

    python scripts/compare_systems.py [--output runs/systems]

Eagle3, MTP-1, DFlash and DSpark with a Markov or an RNN head learn from the same files for the same
steps, with all else as the presets of the target have it; `infer.evaluate` then measures accepted
lengths. Each step is a command that is printed, and that goes on where it was when the script is
started again.
"""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import tyro

KINDS = ("mtp", "eagle3", "dflash", "", "rnn")
"""Behind the name of the target's preset; the one without is DSpark with a Markov head."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of the comparison."""

    output: Path = Path("runs/systems")
    """Folder of workdirs and of the evaluation."""
    target: str = "tiny"
    """Preset of the target: tiny or smollm2."""
    files: tuple[str, ...] = ("stdlib",)
    """To learn from."""
    prompts: tuple[Path, ...] = (Path("runs/held_out.jsonl"),)
    """To measure on."""
    steps: int = 800
    max_new_tokens: int = 128
    slots: int = 32


def run(*arguments: object) -> None:
    """Runs a module as a command; ends the script when it fails."""
    command = [sys.executable, "-m", *map(str, arguments)]
    print(f"$ {shlex.join(command)}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code)


def main(settings: Settings) -> None:
    workdirs = {}
    for kind in KINDS:
        preset = "_".join(filter(None, (settings.target, kind)))
        workdirs[kind] = settings.output / preset
        run(
            "train.main", preset, "--workdir", workdirs[kind], "--files", *settings.files,
            "--steps", settings.steps, "--save-every", 100, "--log-every", 100,
        )  # fmt: skip
    run(
        "infer.evaluate", "--draft", *[w / "drafter" for w in workdirs.values()],
        "--prompts", *settings.prompts, "--output", settings.output / "evaluation",
        "--max-new-tokens", settings.max_new_tokens, "--slots", settings.slots,
    )  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
