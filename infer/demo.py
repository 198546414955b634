"""What `infer.generate` shows without a prompts file: text, accepted lengths, and the speed-up."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import jax

from dspark_jax.request import Completion, Request
from dspark_jax.state import block_size
from infer.engine import Engine, Run
from infer.requests import Line
from infer.summary import mean_accepted_length

PROMPTS: tuple[dict[str, Any], ...] = (
    {"turns": ["Complete this function:\ndef count(items):\n"]},
    {"prompt": "class Queue:\n    def __init__(self, maxsize=0):", "temperature": 0.7},
    {"prompt": "def read_text(path, encoding=None):", "temperature": 0.7, "top_p": 0.9},
    {"prompt": "import os\n\n\ndef is_absolute(path):", "temperature": 1.0},
)
MOST_TOKENS = 96
REPEATS = 3

SMALL = 10_000_000
"""Parameters of a target up to which `WHY_SLOW` is true of it."""
WHY_SLOW = (
    "A target this small is bound by arithmetic and by the overhead of each operation, not by"
    " reading its weights, so checking K tokens costs nearly K times as much as making one; for a"
    " real model see docs/results.md."
)


def lines(limit: int) -> list[Line]:
    """The prompts of the package, with at most `limit` new tokens each."""
    limits = {"max_new_tokens": min(limit, MOST_TOKENS)}
    return [Line(n, n, fields | limits) for n, fields in enumerate(PROMPTS, start=1)]


def show(engine: Engine, lines: Sequence[Line], asked: Sequence[Request]) -> None:
    """Decodes and prints; the speed-up is that of the median of some repeats."""
    plain = engine.plain()
    runs = [(engine.decode_all(asked), plain.decode_all(asked)) for _ in range(REPEATS)]
    run, baseline = (_median([pair[i] for pair in runs]) for i in (0, 1))
    for line, request, completion in zip(lines, asked, run.completions, strict=True):
        print(_caption(request, completion))
        text = line.fields.get("prompt") or line.fields["turns"][0]
        for row in (text + completion.text).splitlines():
            print(f"  | {row}")
        print()
    _print_speed(engine, run, baseline)


def _median(runs: Sequence[Run]) -> Run:
    return dataclasses.replace(runs[0], seconds=statistics.median(run.seconds for run in runs))


def _caption(request: Request, completion: Completion) -> str:
    length = mean_accepted_length([completion])
    accepted = "" if length is None else f", accepted length {length:.2f}"
    return (
        f"temperature {request.temperature:g}: {len(completion.token_ids)} tokens in"
        f" {len(completion.accepted_lengths)} rounds{accepted}"
    )


def _print_speed(engine: Engine, run: Run, baseline: Run) -> None:
    rate, plain_rate = run.tokens_per_second or 0.0, baseline.tokens_per_second or 1.0
    size = block_size(engine.pair.models, engine.cfg)
    print(
        f"{rate:,.0f} tokens/s with {size} drafts a round, {plain_rate:,.0f} plainly: speed-up"
        f" {rate / plain_rate:.2f} ({engine.shape.rows} prompts at once,"
        f" {jax.devices()[0].device_kind})"
    )
    parameters = sum(x.size for x in jax.tree.leaves(engine.pair.models.target))
    if rate < plain_rate and parameters <= SMALL:
        print(WHY_SLOW)
