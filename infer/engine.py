"""A pair in one shape of batch, and its clock: compiling is never counted as decoding."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from dspark_jax import generation
from dspark_jax.decode import DecodeConfig
from dspark_jax.generation import BatchShape, Completion, Pair, Request


@dataclasses.dataclass(frozen=True)
class Run:
    """Requests that were decoded, and how long it took: prefill and rounds, without compiling."""

    requests: Sequence[Request] = ()
    completions: Sequence[Completion] = ()
    seconds: float = 0.0
    compile_seconds: float = 0.0

    def __add__(self, other: Run) -> Run:
        return Run(
            [*self.requests, *other.requests],
            [*self.completions, *other.completions],
            self.seconds + other.seconds,
            self.compile_seconds + other.compile_seconds,
        )

    @property
    def tokens(self) -> int:
        """Tokens that came out."""
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.completions else None


@dataclasses.dataclass(frozen=True)
class Engine:
    """Decodes batches of `shape.rows` rows; the first one compiles."""

    pair: Pair
    shape: BatchShape
    cfg: DecodeConfig

    def warm_up(self) -> Run:
        """Compiles, so that no batch does."""
        seconds = generation.warm_up(self.pair.models, self.shape, self.cfg)
        return Run(compile_seconds=seconds)

    def decode(self, requests: Sequence[Request]) -> Run:
        """One batch, of at most `shape.rows` requests."""
        if not requests:
            return Run()
        begin = time.monotonic()
        decoded = generation.decode_batch(self.pair.models, requests, self.shape, self.cfg)
        completions = generation.collect(self.pair, requests, decoded, self.cfg)
        return Run(requests, completions, time.monotonic() - begin)

    def decode_all(self, requests: Sequence[Request]) -> Run:
        """Any number of requests, batch after batch, warm."""
        run = self.warm_up()
        for first in range(0, len(requests), self.shape.rows):
            run += self.decode(requests[first : first + self.shape.rows])
        return run

    def plain(self) -> Engine:
        """The same target in the same shape without a drafter: the baseline of a speed-up."""
        models = dataclasses.replace(self.pair.models, drafter=None, drafter_config=None)
        cfg = dataclasses.replace(self.cfg, policy="none", threshold=None, trace=False)
        return Engine(dataclasses.replace(self.pair, models=models), self.shape, cfg)
