"""Kills training again and again, starts it again each time, and compares what it has learnt.

    python scripts/kill_and_resume_training.py --times 20

Trains a small drafter for the target of the package: once without interruption, then in processes
that get SIGKILL at a random moment of their life, in the middle of an epoch, or at the edge of one,
in turn. When a run comes to its end and kills are left, another is begun. The metrics of every step
must be in the file exactly once and, apart from times, equal to the bit to those of the run without
interruption; so must be the exported drafter. Exit code 0: so it was; 1: it was not, and the first
difference is printed.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import killable
import numpy as np

from dspark_jax.generation import EMBEDDED
from dspark_jax.io import cli
from dspark_jax.io.tokenizer import load_tokenizer
from train import corpus

LENGTH, BATCH = 64, 4
TIMED = {
    "tokens_per_second",
    "input_wait",
    "mfu",
    "peak_memory_bytes",
    "first_step_seconds",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of the experiment."""

    times: int = 20
    """How often a process is killed."""
    steps: int = 60
    epoch: int = 12
    """Steps of an epoch."""
    save_every: int = 5
    seed: int = 0
    workdir: Path | None = None
    """Where the files go; default: a folder that is removed at the end."""


def write_documents(path: Path, settings: Settings) -> None:
    """Writes documents of more than half a row, so that each has a row of its own."""
    rng, tokenizer = np.random.default_rng(settings.seed), load_tokenizer(EMBEDDED / "target")
    tokens = tokenizer.encode("".join(corpus.stdlib_texts()[:20]))
    left = settings.epoch * BATCH
    with open(path, "w", encoding="utf-8") as file:
        while left:
            start, size = rng.integers(len(tokens) - LENGTH), rng.integers(40, 60)
            text = tokenizer.decode(tokens[start : start + size])
            if LENGTH // 2 < len(tokenizer.encode(text)) <= LENGTH:
                print(json.dumps({"text": text}), file=file)
                left -= 1


@dataclasses.dataclass(frozen=True)
class Job:
    """The command, and where its files are."""

    settings: Settings
    folder: Path

    def start(self, workdir: Path) -> subprocess.Popen[str]:
        options = {
            "workdir": workdir,
            "files": self.folder / "documents.jsonl",
            "steps": self.settings.steps,
            "save-every": self.settings.save_every,
            "log-every": 1,
            "max-length": LENGTH,
            "batch-size": BATCH,
            "num-layers": 1,
            "block-size": 3,
            "markov-rank": 8,
            "num-anchors": 4,
            "devices": 1,
        }
        return killable.start("train.main", options, self.folder)

    def require_success(self, code: int) -> None:
        killable.require_success(code, self.folder)


def last_step(workdir: Path) -> int:
    """Step of the last whole line of metrics."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def kill_once(job: Job, workdir: Path, kind: str, rng: np.random.Generator, seconds: float) -> bool:
    """Starts and kills one process; False if it came to its end before that."""
    epoch, before = job.settings.epoch, last_step(workdir)
    wanted = before // epoch * epoch + epoch
    if kind == "middle":
        wanted += int(rng.integers(1, epoch))
    begin, moment = time.monotonic(), rng.uniform(0, seconds)
    process = job.start(workdir)
    while process.poll() is None:
        reached = last_step(workdir) >= wanted
        if time.monotonic() - begin >= moment if kind == "random" else reached:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    code = process.wait()
    if code != -signal.SIGKILL:
        job.require_success(code)
        return False
    print(f"killed ({kind}) after {time.monotonic() - begin:.1f} s, at step {last_step(workdir)}")
    return True


def difference(workdir: Path, whole: Path) -> str | None:
    """The first difference between two runs; None if there is none."""
    found, expected = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (workdir, whole)
    )
    if [x["step"] for x in found] != [x["step"] for x in expected]:
        return f"the lines are of the steps {[x['step'] for x in found]}"
    for one, other in zip(found, expected, strict=True):
        for name in other.keys() - TIMED:
            if one[name] != other[name]:
                return f"step {one['step']}: {name} is {one[name]}, uninterrupted {other[name]}"
    weights = (path / "drafter" / "model.safetensors" for path in (workdir, whole))
    first, second = (path.read_bytes() for path in weights)
    return None if first == second else "the exported drafters differ"


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="kill_and_resume_training", description=__doc__ or "")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (settings.workdir or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return experiment(Job(settings, folder))


def experiment(job: Job) -> int:
    settings, folder = job.settings, job.folder
    write_documents(folder / "documents.jsonl", settings)
    whole, workdir = folder / "whole", folder / "killed"
    for name in ("warm", "whole"):  # the first compiles, the second tells how long one lives
        shutil.rmtree(folder / name, ignore_errors=True)
        begin = time.monotonic()
        job.require_success(job.start(folder / name).wait())
        seconds = time.monotonic() - begin
    steps: list[dict[str, Any]] = [
        json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()
    ]
    print(f"uninterrupted: {len(steps)} steps in {seconds:.0f} s, last loss {steps[-1]['loss']}")
    rng, kinds = np.random.default_rng(settings.seed), ("random", "middle", "edge")
    kills: collections.Counter[str] = collections.Counter()
    rounds = 0
    shutil.rmtree(workdir, ignore_errors=True)
    while True:
        kind = kinds[kills.total() % len(kinds)]
        if kills.total() < settings.times:
            if kill_once(job, workdir, kind, rng, seconds):
                kills[kind] += 1
                continue
        else:
            job.require_success(job.start(workdir).wait())
        rounds += 1
        wrong = difference(workdir, whole)
        if wrong:
            print(wrong)
            return 1
        if kills.total() == settings.times:
            break
        shutil.rmtree(workdir)
    print(
        f"{kills.total()} kills ({', '.join(f'{n} {kind}' for kind, n in sorted(kills.items()))}):"
        f" {rounds} runs came to their end, each with all {len(steps)} steps once and equal to the"
        " bit, and the same drafter"
    )
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
