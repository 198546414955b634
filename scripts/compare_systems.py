"""Trains drafters of all kinds alike, and measures them on prompts that they have not seen.

    python scripts/compare_systems.py
    python scripts/compare_systems.py --target smollm2 --questions FOLDER

The target answers questions, Eagle3, MTP-1, DFlash and DSpark with a Markov or an RNN head learn
from the answers, on the same rows for as many steps and with all else as its presets have it, and
`infer.evaluate` measures them on other questions. Those of the embedded target are pieces of the
standard library. Those of SmolLM2 are the prompt files of a folder, as scripts/prepare_prompts.py
makes them: every fourth of a file is measured on, and the others are answered twice, greedily and
at temperature 0.8. Each step is a command that is printed, and that goes on where it was when the
script is started again.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from configs import smollm2
from dspark_jax.config import InputError, require
from dspark_jax.io import cli
from dspark_jax.io.files import require_room
from infer import requests

KINDS = ("mtp", "eagle3", "dflash", "", "rnn")
"""Behind the name of the target's preset; the one without is DSpark with a Markov head."""
LONGEST = 800
"""Characters of a question that is learnt from: the answer has to fit the row as well."""
SMOLLM2 = smollm2.SETTINGS.target


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of the comparison."""

    output: Path = Path("runs/systems")
    """Folder of answers, workdirs and the evaluation."""
    target: Literal["tiny", "smollm2"] = "tiny"
    """The embedded one, or SmolLM2-135M-Instruct, which scripts/fetch_smollm2.py fetches."""
    questions: Path | None = None
    """Folder of prompt files for SmolLM2."""
    steps: int = 800
    batches: int = 100
    """Batches whose states are stored; longer runs meet them again."""
    temperature: float = 1.0
    """Of what is measured."""
    limit: int | None = None
    """Most prompts to measure on, of each file."""
    max_new_tokens: int = 128
    slots: int = 32


def run(*arguments: object) -> None:
    """Runs Python with the arguments; ends the script when that fails."""
    command = [sys.executable, *map(str, arguments)]
    print(f"$ {shlex.join(command)}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code)


def ask_embedded(folder: Path) -> list[object]:
    """Questions for the embedded target; returns what makes `infer.generate` answer them."""
    made = "scripts/stdlib_prompts.py"
    run(made, "--output", folder / "measured" / "stdlib.jsonl")
    asked = folder / "asked.jsonl"
    run(made, "--part", "training", "--prompts", 8192, "--characters", 48, "--output", asked)
    return ["--temperature", 1, "--max-new-tokens", 168, "--slots", 64]


def ask_smollm2(questions: Path | None, folder: Path) -> list[object]:
    """Questions for SmolLM2; returns what makes `infer.generate` answer them."""
    require(questions is not None, "--target smollm2: expected --questions FOLDER of prompt files")
    folder_of = Path(questions or ".")
    require(folder_of.is_dir(), f"{questions}: no such folder, expected one of prompt files")
    files = sorted(folder_of.glob("*.jsonl"))
    require(bool(files), f"{questions}: no prompt files in it, expected NAME.jsonl")
    asked = []
    for file in files:
        lines = requests.read_lines(file)
        kept = [json.dumps(line.fields) + "\n" for line in lines[::4]]
        (folder / "measured" / file.name).write_text("".join(kept))
        for number, line in enumerate(lines):
            where, turns = f"{file} line {line.number}", line.fields.get("turns")
            require(line.error is None, f"{where}: {line.error}")
            match turns:
                case [str(question), *_]:
                    pass
                case _:
                    shown = reprlib.repr(turns)
                    raise InputError(f"{where}: turns={shown}: expected texts, the first is asked")
            if number % 4 and len(question) <= LONGEST:
                asked.append({"id": f"{file.stem}/{number}", "turns": [question]})
    # Those that are read together at the start are then of one length.
    asked.sort(key=lambda entry: len(entry["turns"][0]))
    twice = [{**entry, "temperature": t} for t in (0.0, 0.8) for entry in asked]
    text = "".join(
        json.dumps({**entry, "id": f"{entry['id']}/{entry['temperature']}"}) + "\n"
        for entry in twice
    )
    (folder / "asked.jsonl").write_text(text)
    return ["--target", SMOLLM2, "--max-new-tokens", 256, "--slots", 32]


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="compare_systems", description=__doc__ or "")
    folder = settings.output / settings.target
    require(
        settings.questions is None or settings.target == "smollm2",
        f"--questions {settings.questions}: expected --target smollm2 with it",
    )
    require(settings.steps > 0, f"--steps {settings.steps}: expected a whole number above 0")
    require_room(folder)
    (folder / "measured").mkdir(parents=True, exist_ok=True)
    if settings.target == "tiny":
        options = ask_embedded(folder)
    else:
        options = ask_smollm2(settings.questions, folder)
    answers, features = folder / "answers.jsonl", folder / "features"
    run(
        "-m", "infer.generate", *options, "--draft", "none", "--prompts", folder / "asked.jsonl",
        "--output", answers, "--prompt-ids",
    )  # fmt: skip
    data = ["--files", answers, "--steps", settings.steps]
    run(
        "-m", "train.cache", settings.target, *data, "--batches", settings.batches,
        "--output", features,
    )  # fmt: skip
    drafters = []
    for kind in KINDS:
        preset = "_".join(filter(None, (settings.target, kind)))
        run(
            "-m", "train.main", preset, "--workdir", folder / preset, *data,
            "--features", features, "--save-every", 100, "--log-every", 25,
        )  # fmt: skip
        drafters.append(folder / preset / "drafter")
    target = ["--target", SMOLLM2] if settings.target == "smollm2" else []
    limit = [] if settings.limit is None else ["--limit", settings.limit]
    run(
        "-m", "infer.evaluate", *target, "--draft", *drafters,
        "--prompts", *sorted((folder / "measured").iterdir()), "--output", folder / "evaluation",
        "--temperature", settings.temperature, "--max-new-tokens", settings.max_new_tokens,
        "--slots", settings.slots, *limit,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
