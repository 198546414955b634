"""Prompts of newcomers, read beside a running batch.

The next prompt in the queue is read while the rows of the batch decode, so that it need not be
waited for when a row becomes free; a long one a few chunks at a time, so that it does not hold the
rows up. `prefill.seat` then copies what was read into the row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from dspark_jax import prefill
from dspark_jax.batch_shape import BatchShape
from dspark_jax.prefill import Reading
from dspark_jax.state import Models, without_drafter

CHUNKS_PER_CALL = 4
"""Chunks of a prompt that are read before the rows of the batch go on."""


class PromptReader:
    """Reads one prompt at a time, in caches of its own.

    Programs that one thread sends to a CPU run one after the other. Those for the prompts come from
    a second thread, and run beside the rounds on cores that these leave idle. On a mesh all devices
    have to be sent the same programs in the same order, which takes one thread.

    Args:
      lazy: as `state.is_lazy` says.
    """

    def __init__(self, models: Models, shape: BatchShape, *, lazy: bool):
        self.models, self.shape = models, shape
        self._thread = ThreadPoolExecutor(1) if models.mesh is None else None
        self._prompt: list[int] = []  # what is read, and how many chunks of it
        self._chunks = 0
        self._reading: Future[Reading] = Future()
        self._reading.set_result(_create_reading(models, shape, lazy))

    def read_on(self, prompt: Sequence[int]) -> bool:
        """Begins with the next part of a prompt; returns whether that was the last one.

        A prompt that was read before it and is the same is not read again.
        """
        if list(prompt) != self._prompt:
            self._prompt, self._chunks = list(prompt), 0
        total = -(-len(prompt) // self.shape.chunk)
        start, stop = self._chunks, min(total, self._chunks + CHUNKS_PER_CALL)
        if start < stop:
            self._chunks = stop
            tokens = np.zeros((1, self.shape.prompt_length), np.int32)
            tokens[0, : len(prompt)] = prompt
            lengths = self.lengths

            def read(reading: Reading) -> Reading:
                models, cache, lazy = self.models, reading.draft_cache, reading.backlog is not None
                if lazy:
                    models, reading = without_drafter(models, reading)
                reading = prefill.read(
                    models,
                    reading,
                    tokens,
                    lengths,
                    np.int32(start),
                    np.int32(stop),
                    chunk=self.shape.chunk,
                )
                return dataclasses.replace(reading, draft_cache=cache) if lazy else reading

            self._then(read)
        return stop == total

    def catch_up(self) -> None:
        """The drafter takes in what has been read."""
        lengths = self.lengths
        self._then(lambda reading: prefill.catch_up(self.models, reading, lengths))

    @property
    def lengths(self) -> np.ndarray:
        """[1] Tokens of the prompt."""
        return np.array([len(self._prompt)], np.int32)

    @property
    def reading(self) -> Reading:
        """What has been read, once all of it has been sent to the device."""
        return self._reading.result()

    def _then(self, step: Callable[[Reading], Reading]) -> None:
        """The next step of the reading, behind those before it."""
        before = self._reading
        if self._thread is None:
            self._reading = Future()
            self._reading.set_result(step(before.result()))
            return
        # The caller's choice of a default device does not reach another thread.
        (device,) = self.models.target.embed.devices()

        def run() -> Reading:
            with jax.default_device(device):
                return step(before.result())

        self._reading = self._thread.submit(run)


@functools.partial(jax.jit, static_argnames=("shape", "lazy"))
def _create_reading(models, shape, lazy):
    return prefill.create_reading(models, 1, shape.length, lazy=lazy)
