"""Continues prompts with a target and its drafter; what comes out is the target's own.

python -m infer.generate                                  a few built-in prompts, printed
python -m infer.generate --prompts FILE --output FILE     JSON lines in, JSON lines out

A line of --prompts holds one of "prompt" (text), "messages" (a chat), "turns" (strings; the first
is asked) or "token_ids", and optionally "id", "temperature", "top_p", "top_k", "min_p",
"max_new_tokens" and "seed". A run that was interrupted goes on where it was when started again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from dspark_jax import generation
from dspark_jax.config import InputError
from dspark_jax.generation import Pair, Request
from dspark_jax.io import cli
from infer import demo, requests, results, summary
from infer.engine import Engine, Run
from infer.requests import Line, Prompt
from infer.settings import Settings


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="infer.generate", description=__doc__ or "")
    settings.check()
    try:
        if settings.prompts is None or settings.output is None:
            show(settings)
        else:
            decode_file(settings, settings.prompts, settings.output)
    except KeyboardInterrupt:
        again = "; the same command goes on behind the results that are there"
        print(f"interrupted{again if settings.output else ''}", file=sys.stderr)
        return 130
    return 0


def decode_file(settings: Settings, source: Path, output: Path) -> None:
    """Results of all prompts in `source` that have none in `output` yet."""
    lines = requests.read_lines(source)
    done = results.finished(output, settings.decisive(), source, [line.id for line in lines])
    pair = settings.load()
    prompts = build_prompts(settings, lines, pair)
    errors = [prompt.error for prompt in prompts if prompt.error is not None]
    if len(errors) == len(prompts):
        raise InputError(f"{source} {errors[0]}; no line of the file can be decoded")
    engine = make_engine(settings, pair, [p.request for p in prompts if p.request])
    results.begin(output, results.meta(settings.decisive(), source))
    todo = prompts[done:]
    run = engine.warm_up() if any(p.request for p in todo) else Run()
    with tqdm(total=len(prompts), initial=done, unit="prompt", disable=None) as bar:
        for part in batches(todo, engine.shape.rows):
            made = engine.decode([p.request for p in part if p.request])
            left = iter(made.completions)
            found = [(p, next(left) if p.request else None) for p in part]
            results.append(output, [results.result(*x, trace=settings.trace) for x in found])
            run += made
            bar.update(len(part))
    figures = summary.summarise(engine, run)
    figures |= {"dtype": settings.dtype, "errors": len(errors), "finished_before": done}
    if settings.compare_baseline:
        figures |= summary.compare(run, engine.plain().decode_all(run.requests))
    if settings.summary is not None and (run.completions or not settings.summary.exists()):
        results.write_json(settings.summary, figures)
    print(f"{output}: {summary.in_words(figures)}")
    if errors:
        said = f"{len(errors)} of {len(prompts)} prompts could not be decoded"
        print(f"{said}; the first is {errors[0]}", file=sys.stderr)


def batches(prompts: Sequence[Prompt], rows: int) -> Iterator[list[Prompt]]:
    """The prompts in order, in parts of `rows` that can be decoded and any number that cannot."""
    part: list[Prompt] = []
    for prompt in prompts:
        if prompt.request and sum(p.request is not None for p in part) == rows:
            yield part
            part = []
        part.append(prompt)
    if part:
        yield part


def build_prompts(settings: Settings, lines: Sequence[Line], pair: Pair) -> list[Prompt]:
    defaults, thinking = settings.defaults, settings.thinking
    return [requests.build(x, pair, defaults=defaults, thinking=thinking) for x in lines]


def make_engine(settings: Settings, pair: Pair, asked: Sequence[Request]) -> Engine:
    """One shape for all requests, so that a run which is continued decodes as it began."""
    drafter = pair.models.drafter_config
    cfg = generation.decode_config(
        pair.models,
        asked,
        policy=settings.scheduling,
        threshold=settings.confidence_threshold,
        ignore_stop=settings.ignore_eos,
        trace=settings.trace and drafter is not None and drafter.confidence_head,
    )
    return Engine(pair, generation.plan(pair.models, asked, min(settings.slots, len(asked))), cfg)


def show(settings: Settings) -> None:
    """Decodes the prompts of the package, and prints what came out and how fast."""
    pair = settings.load()
    lines = demo.lines(settings.max_new_tokens)
    asked = [p.request for p in build_prompts(settings, lines, pair) if p.request]
    demo.show(make_engine(settings, pair, asked), lines, asked)


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
