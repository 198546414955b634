"""Kills decoding again and again, starts it again each time, and looks at what is in the file.

    python scripts/kill_and_resume.py --times 30

Decodes prompts of mixed length, temperature and limit with the pair of the package: once without
interruption, then in processes that get SIGKILL at a random moment, between the start and the last
result. When all results are there and kills are left, the file is begun again. Every request must
be in the file exactly once, in order, and greedy ones with the same tokens as uninterrupted.
Exit code 0: so it was; 1: it was not, and the differences are printed.
"""

from __future__ import annotations

import collections
import dataclasses
import json
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

from dspark_jax.io import cli

TEXT = (
    "import os\n\n\ndef is_absolute(path):\n    return path.startswith('/')\n\n\n"
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of the experiment."""

    times: int = 30
    """How often a process is killed."""
    requests: int = 500
    slots: int = 16
    max_new_tokens: int = 96
    """The largest of the limits, which are 1 or more."""
    policy: str = "fixed"
    target: str | None = None
    draft: str | None = None
    """Another pair than that of the package; both or neither."""
    seed: int = 0
    workdir: Path | None = None
    """Where the files go; default: a folder that is removed at the end."""


@dataclasses.dataclass
class Found:
    """What the kills met."""

    kills: int = 0
    before_the_first: int = 0
    """Kills of a process that had added nothing."""
    torn: int = 0
    """Kills that left half a line."""
    rounds: int = 0
    """How often the file came to its end."""


def write_prompts(path: Path, settings: Settings) -> list[bool]:
    """Writes the prompts; returns which of them are greedy."""
    rng = np.random.default_rng(settings.seed)
    greedy = []
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(settings.requests):
            start = int(rng.integers(0, len(TEXT) - 1))
            temperature = float(rng.choice([0, 0, 0.7, 1.0]))
            greedy.append(temperature == 0)
            line = {
                "prompt": TEXT[start : start + int(rng.integers(1, 160))],
                "temperature": temperature,
                "max_new_tokens": int(rng.integers(1, settings.max_new_tokens + 1)),
            }
            print(json.dumps(line), file=file)
    return greedy


@dataclasses.dataclass(frozen=True)
class Job:
    """The command, and where its files are."""

    settings: Settings
    folder: Path

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    def start(self, output: Path) -> subprocess.Popen[str]:
        options = {
            "prompts": self.prompts,
            "output": output,
            "slots": self.settings.slots,
            "policy": self.settings.policy,
        }
        for name in ("target", "draft"):
            options[name] = getattr(self.settings, name)
        return killable.start("infer.generate", options, self.folder)

    def require_success(self, code: int) -> None:
        killable.require_success(code, self.folder)


def whole_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_once(job: Job, output: Path, rng: np.random.Generator, share: int, found: Found) -> bool:
    """Starts and kills one process; False if it came to its end before that.

    One in five is killed within its first seconds, whatever it does then; the others when they have
    added up to `share` results, and a moment later.
    """
    before = whole_lines(output)
    early = rng.random() < 0.2
    moment = time.monotonic() + rng.uniform(0, 10)
    wanted = before + int(rng.integers(1, share + 1))
    process = job.start(output)
    while time.monotonic() < moment if early else whole_lines(output) < wanted:
        if process.poll() is not None:
            break
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    code = process.wait()
    if code != -signal.SIGKILL:
        job.require_success(code)
        return False
    found.kills += 1
    found.before_the_first += whole_lines(output) == before
    found.torn += output.exists() and output.read_bytes()[-1:] not in (b"", b"\n")
    return True


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def differences(
    results: Sequence[dict[str, Any]], whole: Sequence[dict[str, Any]], greedy: Sequence[bool]
) -> tuple[list[str], int]:
    """What is wrong with the results; and how many sampled ones differ, which is not."""
    ids = [x["id"] for x in results]
    twice = [name for name, count in collections.Counter(ids).items() if count > 1]
    absent = sorted({x["id"] for x in whole} - set(ids))
    wrong = [f"id {name} is there more than once" for name in twice]
    wrong += [f"id {name} is not there" for name in absent]
    if wrong:
        return wrong, 0
    if ids != [x["id"] for x in whole]:
        return ["the order is not that of the prompts"], 0
    differ = [a["token_ids"] != b["token_ids"] for a, b in zip(results, whole, strict=True)]
    for name, changed, is_greedy in zip(ids, differ, greedy, strict=True):
        if changed and is_greedy:
            wrong.append(f"id {name} is greedy and has other tokens than uninterrupted")
    return wrong, sum(differ) - len(wrong)


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="kill_and_resume", description=__doc__ or "")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (settings.workdir or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return experiment(Job(settings, folder))


def experiment(job: Job) -> int:
    settings, folder = job.settings, job.folder
    greedy = write_prompts(job.prompts, settings)
    reference = folder / "whole.jsonl"
    reference.unlink(missing_ok=True)
    begin = time.monotonic()
    job.require_success(job.start(reference).wait())
    whole = read(reference)
    print(f"uninterrupted: {len(whole)} results in {time.monotonic() - begin:.0f} s", flush=True)
    rng, found = np.random.default_rng(settings.seed + 1), Found()
    output = folder / "out.jsonl"
    sampled = 0
    share = max(1, 2 * settings.requests // max(settings.times, 1))
    while found.kills < settings.times:
        output.unlink(missing_ok=True)
        while found.kills < settings.times and kill_once(job, output, rng, share, found):
            done = whole_lines(output)
            print(f"kill {found.kills}: {done} of {len(whole)} results are there", flush=True)
        if found.kills == settings.times:
            job.require_success(job.start(output).wait())
        found.rounds += 1
        wrong, differ = differences(read(output), whole, greedy)
        sampled += differ
        if wrong:
            print("\n".join(wrong))
            return 1
    print(
        f"{found.kills} kills, {found.before_the_first} of them before a process had added a"
        f" result, {found.torn} in the middle of a line; the file came to its end"
        f" {found.rounds} times"
    )
    print(
        f"each time all {len(whole)} requests were there once and in order, the {sum(greedy)}"
        f" greedy ones with the same tokens; {sampled} sampled ones had others"
    )
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
