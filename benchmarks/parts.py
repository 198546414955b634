"""Drafters of one target, and what the parts of their rounds take, for the benchmarks beside.

In decoding a round is one program, so that its parts are timed apart, each in a loop of its own
(`infer.stages`):

    sequential head   drafting with the head, less drafting by the same weights without it
    LM head           the product of as many states as a draft has, and a choice from it; of a
                      drafter that makes a token at a time, K times that of one state a row
    backbone          what is left of drafting: layers, embedding, choice of tokens
    verify            the target's pass over all drafts, its LM head included
    rest              what is left of a whole round, as the cost table has it: the verdict, the
                      commit, and the states that the drafter takes in

What is left over has the noise of all that was taken off, and may come out below 0 where it is
little: the benchmarks time all systems in turn, many times, and take medians.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import generation, rounds, vocabulary
from dspark_jax.batch_shape import BatchShape
from dspark_jax.config import RecurrentConfig, require
from dspark_jax.drafters import dspark, heads, recurrent
from dspark_jax.flat import pack
from dspark_jax.generation import Pair
from dspark_jax.io import hf
from dspark_jax.layers import argmax
from dspark_jax.state import DecodeConfig, DecodeState, Models
from dspark_jax.targets import dense
from dspark_jax.targets.dense import Target
from infer import results, stages
from infer.evaluation.sample import names_of

BYTES = 256 * 2**20
"""That are read to measure the bandwidth: far more than caches hold."""


def check_settings(
    counts: Mapping[str, Sequence[int]], json: Path | None, hf_python: Path | None = None
) -> None:
    """Raises `InputError` for numbers that are not above 0, and where no figures can be written.

    Also where transformers are to be run by an interpreter that is not there.
    """
    for option, numbers in counts.items():
        require(
            len(numbers) > 0 and min(numbers) > 0,
            f"{option} {' '.join(map(str, numbers))}: expected whole numbers above 0",
        )
    if json is not None:
        results.check_place(json, "--json")
    found = hf_python is None or hf_python.is_file()
    require(found, f"--hf-python {hf_python}: no such file, expected an interpreter")


def load_systems(
    target: Path, drafts: Sequence[Path], sizes: Sequence[int], dtype: str
) -> tuple[Pair, dict[str, Pair]]:
    """The target alone, and with each drafter, by the name of its folder and its block length.

    The name is the part of the path that tells it from the others.

    Args:
      sizes: block lengths; of a drafter those that it was trained for count, or if none is, its
        own.
    Raises:
      InputError: a folder was given twice, or its drafter doesn't fit the target.
    """
    names = names_of([str(path.absolute()) for path in drafts])
    require(len(set(names)) == len(names), "--draft: expected different folders")
    plain = generation.load(target, None, dtype=jnp.dtype(dtype))
    pairs = {}
    for name, path in zip(names, drafts, strict=True):
        cfg, drafter = hf.load_drafter(path, target=plain.models.target, dtype=jnp.dtype(dtype))
        cfg.check_fits(plain.models.target_config)
        models = dataclasses.replace(plain.models, drafter=drafter, drafter_config=cfg)
        pair = dataclasses.replace(plain, models=models)
        for size in [k for k in sizes if 1 <= k <= cfg.block_size] or [cfg.block_size]:
            pairs[f"{name}, block {size}"] = generation.with_block_size(pair, size)
    return plain, pairs


def without_head(models: Models) -> Models | None:
    """The same models without the sequential head; None where there is none."""
    drafter = models.drafter
    if not isinstance(drafter, dspark.Drafter) or drafter.head is None:
        return None
    # The confidence head may read the sequential one.
    bare = dataclasses.replace(drafter, head=None, confidence=None)
    return dataclasses.replace(models, drafter=bare)


def draft_seconds(
    models: Models, cfg: DecodeConfig, shape: BatchShape, drafts: int
) -> tuple[float, float | None]:
    """Time of drafting so many tokens for all rows: without the sequential head, and of that.

    The confidences are taken with the head where the policy looks at them. None without a head.
    """
    bare, whole = without_head(models), stages.draft_seconds(models, cfg, shape, drafts)
    if bare is None:
        return whole, None
    rest = stages.draft_seconds(bare, cfg, shape, drafts)
    return rest, whole - rest


def lm_head_seconds(models: Models, rows: int, drafts: int) -> float:
    """Time of the LM head in drafting so many tokens for all rows."""
    assert models.drafter is not None
    reader = vocabulary.reader(models.drafter.vocabulary, models.target)
    steps = drafts if isinstance(models.drafter_config, RecurrentConfig) else 1
    width, dtype = reader.embed.shape[1], reader.embed.dtype
    hidden = jax.random.normal(jax.random.key(0), (rows, drafts // steps, width), dtype)
    return steps * stages.seconds_each(lambda count: _lm_head(reader, hidden, np.int32(count)))


@jax.jit
def _lm_head(target: Target, hidden: jax.Array, count: jax.Array) -> jax.Array:
    def body(_, hidden):
        # Other states each time, or the product would be made once for all.
        best = argmax(dense.logits(target, hidden))
        return hidden + 1e-6 * best[..., None].astype(hidden.dtype)

    return jax.lax.fori_loop(0, count, body, hidden)


def verify_seconds(models: Models, cfg: DecodeConfig, shape: BatchShape, drafts: int) -> float:
    """Time of a pass of the target over an anchor and so many drafts of all rows."""
    state = stages.half_full(models, cfg, shape, drafts)

    def call(count: int) -> jax.Array:
        nonlocal state
        state, tokens = _verify(models, state, np.int32(count), drafts=drafts)
        return tokens

    return stages.seconds_each(call)


@functools.partial(jax.jit, static_argnames="drafts", donate_argnames="state")
def _verify(
    models: Models, state: DecodeState, count: jax.Array, *, drafts: int
) -> tuple[DecodeState, jax.Array]:
    """Reads `count` times what the last pass thought best."""
    constants, rows = rounds.make_constants(models, state.target_cache), len(state.anchor)
    counts = jnp.full(rows, 1 + drafts)

    def body(_, carry):
        cache, tokens = carry
        flat = pack(tokens, counts, state.position, rows * (1 + drafts))
        hidden, cache = rounds.target_pass(models, constants, flat, cache)
        best = argmax(dense.logits(models.target, hidden.final))
        return cache, best.reshape(tokens.shape)

    start = state.target_cache, jnp.zeros((rows, 1 + drafts), jnp.int32)
    cache, tokens = jax.lax.fori_loop(0, count, body, start)
    return dataclasses.replace(state, target_cache=cache), tokens


def size_of(weights: Any) -> int:
    """Bytes of a pytree of arrays."""
    return sum(x.nbytes for x in jax.tree.leaves(weights))


def weight_bytes(models: Models, drafts: int) -> dict[str, int]:
    """Bytes of the weights that each part of a round reads, by the names of the parts.

    What is looked up for single tokens isn't counted. A step of a drafter that makes a token at a
    time, or of a sequential head, reads its weights anew.
    """
    target, drafter = models.target, models.drafter
    lm_head = size_of(target.embed if target.lm_head is None else target.lm_head)
    found = {"verify": size_of((target.layers, target.norm)) + lm_head}
    if drafter is None:
        return found
    if drafter.vocabulary is not None:
        lm_head = size_of(drafter.vocabulary.lm_head)
    if isinstance(drafter, dspark.Drafter):
        found |= {"backbone": size_of((drafter.layers, drafter.norm)), "lm_head": lm_head}
        if drafter.head is not None:
            found["head"] = head_bytes(drafter.head, drafter.fc.shape[1], drafts)
        return found
    own = size_of(dataclasses.replace(drafter, confidence=None, vocabulary=None))
    if isinstance(drafter, recurrent.Eagle3):
        own -= size_of(drafter.fc)  # what the target shows is projected behind the pass
    return found | {"backbone": drafts * own, "lm_head": drafts * lm_head}


def head_bytes(head: heads.Markov, width: int, drafts: int) -> int:
    """Of a sequential head on states of `width`: their part is read once, the rest every step."""
    match head:
        case heads.Rnn():
            step, once = head.joint[:-width], head.joint[-width:]
        case heads.Gated():
            step, once = head.gate[width:], head.gate[:width]
        case _:
            step, once = None, None
    return drafts * size_of((head.w2, step)) + size_of(once)


def bandwidth() -> float:
    """Bytes a second that are read from memory by a jitted sum over a large float32 array.

    A sum reads and writes nothing, as a pass does with weights.
    """
    values = jnp.ones(BYTES // 4, jnp.float32)
    return BYTES / _fastest(lambda: jax.block_until_ready(_sum(values)))


def copy_bandwidth() -> float:
    """Bytes a second that are read and written by NumPy's copy, in one thread of the host.

    The copy goes to memory that was written to before. A program of XLA's writes to memory that is
    new each time, and measures that.
    """
    values = np.ones(BYTES // 4, np.float32)
    copy = np.zeros_like(values)
    return 2 * BYTES / _fastest(lambda: np.copyto(copy, values))


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls, as it is to be a roof; the first does not count."""
    run()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@jax.jit
def _sum(values: jax.Array) -> jax.Array:
    return values.sum()
