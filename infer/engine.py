"""A pair in one shape of batch, and its clock: compiling is never counted as decoding."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from dspark_jax import batching, generation
from dspark_jax.batch_shape import BatchShape
from dspark_jax.batching import NO_FACTS, Facts
from dspark_jax.generation import Pair
from dspark_jax.request import Completion, Request
from dspark_jax.state import DecodeConfig


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


Done = Callable[[dict[int, Completion]], bool | None]


@dataclasses.dataclass(frozen=True)
class Engine:
    """Decodes any number of requests in `shape.rows` rows."""

    pair: Pair
    shape: BatchShape
    cfg: DecodeConfig
    facts: Facts = NO_FACTS

    def warm_up(self, *, refill: bool) -> Run:
        """Compiles, so that no decoding does; `refill` as `batching.refills` says."""
        seconds = batching.warm_up(
            self.pair.models, self.shape, self.cfg, refill=refill, facts=self.facts
        )
        return Run(compile_seconds=seconds)

    def decode(self, requests: Sequence[Request], done: Done | None = None) -> Run:
        """Decodes the requests; those that are in the run came to their end.

        Args:
          done: called after each step with the completions that it brought, by number of the
            request; True ends the run. Its own time is not counted.
        """
        if not requests:
            return Run()
        completions: dict[int, Completion] = {}
        seconds, begin = 0.0, time.monotonic()
        for found in generation.complete(self.pair, requests, self.shape, self.cfg, self.facts):
            seconds += time.monotonic() - begin
            completions |= found
            if done is not None and done(found):
                break
            begin = time.monotonic()
        else:
            seconds += time.monotonic() - begin
        numbers = sorted(completions)
        return Run([requests[n] for n in numbers], [completions[n] for n in numbers], seconds)

    def decode_all(self, requests: Sequence[Request]) -> Run:
        """The same, warm."""
        refill = batching.refills(requests, self.shape.rows)
        return self.warm_up(refill=refill) + self.decode(requests)

    def plain(self) -> Engine:
        """The same target in the same shape without a drafter: the baseline of a speed-up."""
        models = dataclasses.replace(self.pair.models, drafter=None, drafter_config=None)
        cfg = dataclasses.replace(self.cfg, policy="none", threshold=None, trace=False)
        return Engine(dataclasses.replace(self.pair, models=models), self.shape, cfg)
