"""Measures how many of a drafter's tokens a target accepts, on files of prompts.

python -m infer.evaluate --prompts FILE.jsonl [FILE.jsonl ..] --output DIR
                         [--target TARGET --draft DRAFTER [DRAFTER ..]]

Decodes every file with every drafter, all drafts verified, and prints for each the accepted length
(tokens a round, the target's own included), its 95 % interval over prompts, and the chance of each
draft to be accepted after those before it. The prompts are to be none that the drafters were
trained on. DIR/evaluation.json has the same, of what has been measured so far.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from dspark_jax import batching, generation
from dspark_jax.config import require
from dspark_jax.generation import EMBEDDED, Pair
from dspark_jax.io import cli, files, model_config
from dspark_jax.request import Request
from dspark_jax.state import block_size
from infer import requests
from infer.engine import Engine
from infer.models import devices_of, load_both
from infer.summary import conditional_acceptance, mean_accepted_length

FILE = "evaluation.json"
RESAMPLES = 10_000
"""Of the prompts, for an interval."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `infer.evaluate`."""

    prompts: tuple[Path, ...]
    """JSONL files of prompts, as for `infer.generate`; of a line's own settings only
    max_new_tokens is heeded."""
    output: Path
    """Folder for evaluation.json; it is made if need be."""
    target: str | None = None
    """Hugging Face folder or repository id, or GGUF file, of the target; default: the one in the
    package."""
    draft: tuple[str, ...] = ()
    """The same of its drafters; default: the one in the package."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    """Most tokens to add to a prompt."""
    slots: int = 16
    """Prompts that are decoded together."""
    block_size: int | None = None
    """Drafts a round, at most what the drafters were trained for, which is the default."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters, activations and caches."""
    tensor_parallel: int = 1
    """Devices that the models and the caches are split over."""
    thinking: bool = False
    """Let answers to chats start with thinking, where the chat template knows that."""
    seed: int = 0

    @property
    def request(self) -> Request:
        """A request with these settings, without its prompt."""
        return Request(token_ids=(0,), **{name: getattr(self, name) for name in SAMPLING})

    def check(self) -> None:
        """Raises `InputError` for what is wrong whatever the models are."""
        for option, given in (("--prompts", self.prompts), ("--draft", self.draft)):
            require(len(set(given)) == len(given), f"{option}: expected different ones")
        require(len(self.prompts) > 0, "--prompts: expected at least one file")
        require(
            self.target is None or len(self.draft) > 0,
            "--target without --draft: expected its drafters",
        )
        require(self.slots >= 1, f"--slots {self.slots}: expected a whole number above 0")
        self.request.check(vocab_size=1, max_position=2)
        require(
            self.output.is_dir() or not self.output.exists(),
            f"--output {self.output}: is a file, expected a folder",
        )
        require(
            self.output.parent.is_dir(),
            f"--output {self.output}: no such folder as {self.output.parent}",
        )


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a drafter did on a file of prompts."""

    draft: str
    prompts: str
    block_size: int
    requests: int
    rounds: int
    """Those that no stop token or limit cut."""
    accepted_length: float | None
    """Mean over them of the tokens that each added; None without any, as the interval is."""
    interval: tuple[float, float] | None
    """Of 95 %."""
    conditional_acceptance: list[float | None]
    """By position; None where nothing was verified."""


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="infer.evaluate", description=__doc__ or "")
    settings.check()
    return cli.until_interrupted(
        lambda: run(settings), lambda: "what was not measured to its end is lost"
    )


def run(settings: Settings) -> None:
    """Measures, prints, and writes after each file of prompts."""
    lines = {path: requests.read_lines(path) for path in settings.prompts}
    drafts = settings.draft or (str(EMBEDDED / "drafter"),)
    sizes = block_sizes(settings, drafts)
    widths = max(map(len, drafts)), max(len(path.name) for path in lines)
    found: list[Measurement] = []
    for draft in drafts:
        _, _, pair = load_both(
            settings.target, draft, settings.dtype, settings.block_size, settings.tensor_parallel
        )
        asked = {
            path: requests.build_alike(
                path, lines[path], pair, defaults=settings.request, thinking=settings.thinking
            )
            for path in lines
        }
        engine = make_engine(pair, [r for each in asked.values() for r in each], settings.slots)
        if not found:
            print(header(*widths, max(sizes)))
        for path, each in asked.items():
            found.append(measure(engine, each, draft=draft, prompts=path, seed=settings.seed))
            print(row(found[-1], *widths), flush=True)
            settings.output.mkdir(exist_ok=True)
            figures = {
                "target": settings.target or "embedded",
                "dtype": settings.dtype,
                "device": devices_of(pair.models),
                "thinking": settings.thinking,
                **{name: getattr(settings, name) for name in SAMPLING},
                "measurements": [dataclasses.asdict(m) for m in found],
            }
            files.write_whole(settings.output / FILE, json.dumps(figures, indent=2) + "\n")


def block_sizes(settings: Settings, drafts: Sequence[str]) -> list[int]:
    """Drafts a round of each drafter.

    Raises:
      InputError: one that does not go with the target, or with the block size that is asked for.
    """
    target = model_config.load_target_config(files.resolve(settings.target or EMBEDDED / "target"))
    sizes = []
    for draft in drafts:
        cfg = model_config.load_drafter_config(files.resolve(draft))
        cfg.check_fits(target)
        size = cfg.block_size if settings.block_size is None else settings.block_size
        require(
            1 <= size <= cfg.block_size,
            f"--block-size {size}: expected 1..{cfg.block_size}, which {draft} was trained for",
        )
        sizes.append(size)
    return sizes


def make_engine(pair: Pair, asked: Sequence[Request], slots: int) -> Engine:
    """One that verifies every draft, in one shape for all requests."""
    cfg = generation.decode_config(pair.models, asked, policy="fixed")
    return Engine(pair, batching.plan(pair.models, asked, min(slots, len(asked))), cfg)


def measure(
    engine: Engine, asked: Sequence[Request], *, draft: str, prompts: Path, seed: int
) -> Measurement:
    """Decodes all requests."""
    with tqdm(total=len(asked), unit="prompt", desc=prompts.name, disable=None) as bar:
        run = engine.decode(asked, lambda done: bar.update(len(done)) and False)
    rounds = [c.full_rounds for c in run.completions]
    size = block_size(engine.pair.models, engine.cfg)
    return Measurement(
        draft=draft,
        prompts=str(prompts),
        block_size=size,
        requests=len(asked),
        rounds=sum(map(len, rounds)),
        accepted_length=mean_accepted_length(run.completions),
        interval=interval(rounds, seed=seed),
        conditional_acceptance=conditional_acceptance(run.completions, size),
    )


def interval(
    rounds: Sequence[Sequence[int]], *, seed: int, part: float = 0.95
) -> tuple[float, float] | None:
    """Where the mean over rounds lies in `part` of the resamples of prompts.

    Rounds of one prompt are alike, so that prompts are drawn, with replacement, and not rounds.

    Args:
      rounds: accepted lengths by prompt; those without any are left out.
    """
    sums = np.array([(sum(each), len(each)) for each in rounds if each])
    if not len(sums):
        return None
    rng = np.random.default_rng(seed)
    often = rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), RESAMPLES)  # [B, N]
    tokens, counts = (often @ sums).T
    low, high = np.quantile(tokens / counts, [(1 - part) / 2, (1 + part) / 2])
    return float(low), float(high)


def header(draft: int, prompts: int, size: int) -> str:
    """Titles of the table, over columns of these widths and `size` positions."""
    positions = "".join(f"{k:7}" for k in range(1, size + 1))
    return (
        f"{'draft':{draft}}  {'prompts':{prompts}}{'length':>8}{'95 %':>15}{'rounds':>9}{positions}"
    )


def row(m: Measurement, draft: int, prompts: int) -> str:
    """A line of the table."""
    length = "-" if m.accepted_length is None else f"{m.accepted_length:.3f}"
    between = "-" if m.interval is None else "{:.3f}..{:.3f}".format(*m.interval)
    accepted = "".join(f"{'-':>7}" if p is None else f"{p:7.3f}" for p in m.conditional_acceptance)
    name = Path(m.prompts).name
    return f"{m.draft:{draft}}  {name:{prompts}}{length:>8}{between:>15}{m.rounds:9,}{accepted}"


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
