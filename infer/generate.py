"""Continues prompts with a target and its drafter; what comes out is the target's own.

python -m infer.generate                                  a few built-in prompts, printed
python -m infer.generate --prompts FILE --output FILE     JSON lines in, JSON lines out

A line of --prompts holds one of "prompt" (text), "messages" (a chat), "turns" (strings; the first
is asked) or "token_ids", and optionally "id", "temperature", "top_p", "top_k", "min_p",
"max_new_tokens", "seed", "stop" (a text or a list of texts) and "n" (completions of the prompt:
each is a line of --output, numbered by "sample"). With --prompt-ids the results are what
`train.main` learns from. A run that was interrupted goes on where it was when started again.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from dspark_jax import batch_shape, batching, generation
from dspark_jax.config import InputError
from dspark_jax.generation import Pair
from dspark_jax.io import cli
from dspark_jax.request import Completion, Request
from infer import demo, facts, requests, results, summary
from infer.engine import Engine, Run
from infer.requests import Line, Prompt
from infer.settings import Settings


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="infer.generate", description=__doc__ or "")
    settings.check()
    if settings.prompts is None or settings.output is None:
        return cli.until_interrupted(lambda: show(settings), lambda: "nothing was written")
    source, output = settings.prompts, settings.output
    return cli.until_interrupted(
        lambda: decode_file(settings, source, output),
        lambda: "the same command goes on behind the results that are there",
    )


def decode_file(settings: Settings, source: Path, output: Path) -> None:
    """Results of all prompts in `source` that have none in `output` yet."""
    lines = requests.read_lines(source)
    keys = [(x.id, sample) for x in lines for sample in requests.samples(x, settings.samples)]
    done = results.finished(output, settings.decisive(), source, keys)
    pair = settings.load()
    prompts = build_prompts(settings, lines, pair)
    errors = [p.error for p in prompts if p.error is not None and not p.sample]
    if len(errors) == len(lines):
        raise InputError(f"{source} {errors[0]}; no line of the file can be decoded")
    engine = make_engine(settings, pair, [p.request for p in prompts if p.request])
    size = results.begin(output, results.meta(settings.decisive(), source), done)
    todo = prompts[done:]
    asked = [p.request for p in todo if p.request]
    refill = batching.refills(asked, engine.shape.rows)
    run = engine.warm_up(refill=refill) if asked else Run()
    with (
        tqdm(total=len(prompts), initial=done, unit="result", disable=None) as bar,
        cli.stop_signals() as stopped,
    ):
        ordered = InOrder(
            todo,
            output,
            size,
            trace=settings.trace,
            logprobs=settings.logprobs,
            prompt_ids=settings.prompt_ids,
        )

        def write(completions: dict[int, Completion]) -> bool:
            bar.update(ordered.write(completions))
            return bool(stopped)

        write({})
        run += engine.decode(asked, write)
        if stopped and ordered.left:
            raise KeyboardInterrupt
    figures = summary.summarise(engine, run)
    figures |= {"dtype": settings.dtype, "errors": len(errors), "finished_before": done}
    if settings.compare_baseline:
        figures |= summary.compare(run, engine.plain().decode_all(run.requests))
    if settings.summary is not None and (run.completions or not settings.summary.exists()):
        results.write_json(settings.summary, figures)
    print(f"{output}: {summary.in_words(figures)}")
    if errors:
        said = f"{len(errors)} of {len(lines)} prompts could not be decoded"
        print(f"{said}; the first is {errors[0]}", file=sys.stderr)


class InOrder:
    """Appends results to a file in the order of the prompts, as soon as that can be done."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        output: Path,
        size: int,
        *,
        trace: bool = False,
        logprobs: bool = False,
        prompt_ids: bool = False,
    ):
        self.left = collections.deque(prompts)
        self._output = output
        self._size = size
        self._result = functools.partial(
            results.result, trace=trace, logprobs=logprobs, prompt_ids=prompt_ids
        )
        self._completions: dict[int, Completion] = {}
        self._written = 0  # requests, which are what completions are numbered by

    def write(self, completions: dict[int, Completion]) -> int:
        """Takes completions by number of the request; returns how many results were appended."""
        self._completions |= completions
        lines = []
        while self.left and (not self.left[0].request or self._written in self._completions):
            prompt, completion = self.left.popleft(), None
            if prompt.request:
                completion = self._completions.pop(self._written)
                self._written += 1
            lines.append(self._result(prompt, completion))
        if lines:
            self._size = results.append(self._output, lines, size=self._size)
        return len(lines)


def build_prompts(settings: Settings, lines: Sequence[Line], pair: Pair) -> list[Prompt]:
    """The prompts of all lines, each as often as it has samples."""
    return [
        prompt
        for line in lines
        for prompt in requests.build_samples(
            line,
            pair,
            defaults=settings.defaults,
            thinking=settings.thinking,
            default=settings.samples,
        )
    ]


def make_engine(settings: Settings, pair: Pair, asked: Sequence[Request]) -> Engine:
    """One shape for all requests, so that a run which is continued decodes as it began."""
    cfg = generation.decode_config(
        pair.models,
        asked,
        policy=settings.policy,
        threshold=settings.confidence_threshold,
        ignore_stop=settings.ignore_eos,
        trace=settings.trace,
        logprobs=settings.logprobs,
    )
    shape = batch_shape.plan(pair.models, asked, min(settings.slots, len(asked)))
    return Engine(pair, shape, cfg, facts.gather(settings, pair, shape, cfg))


def show(settings: Settings) -> None:
    """Decodes the prompts of the package, and prints what came out and how fast."""
    pair = settings.load()
    lines = demo.lines(settings.max_new_tokens)
    asked = [p.request for p in build_prompts(settings, lines, pair) if p.request]
    demo.show(make_engine(settings, pair, asked), lines, asked)


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
