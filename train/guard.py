"""Which steps are taken: those whose loss and gradient are numbers, and not far out of line.

A step is skipped when its loss, the norm of its gradient or that of its update is not finite, or
when the loss or the gradient's norm is more than `spike_factor` times its running mean over the
steps that were taken. The mean of the first n steps is their plain mean; later ones weigh
1 / `WINDOW` each.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from train.settings import GuardSettings

T = TypeVar("T")

WINDOW = 100


@struct.dataclass
class Guard:
    """What is remembered of the steps before."""

    mean: jax.Array  # [2] float32, of loss and gradient norm over steps that were taken
    taken: jax.Array  # [] int32
    skipped: jax.Array  # [] int32
    skipped_in_a_row: jax.Array  # [] int32, up to the last step

    @staticmethod
    def start() -> Guard:
        """Nothing yet."""
        return Guard(jnp.zeros(2), jnp.int32(0), jnp.int32(0), jnp.int32(0))


def judge(
    guard: Guard,
    loss: jax.Array,
    grad_norm: jax.Array,
    update_norm: jax.Array,
    settings: GuardSettings,
) -> tuple[jax.Array, Guard]:
    """Whether a step is taken ([] bool), and what is remembered afterwards; all arguments []."""
    values = jnp.stack([loss, grad_norm])
    finite = jnp.isfinite(values).all() & jnp.isfinite(update_norm)
    known = guard.taken >= settings.spike_after
    spike = known & (values > settings.spike_factor * guard.mean).any()
    good = finite & ~spike
    taken = guard.taken + good
    weight = 1 / jnp.clip(taken, 1, WINDOW)
    mean = jnp.where(good, guard.mean + weight * (values - guard.mean), guard.mean)
    return good, Guard(
        mean=mean,
        taken=taken,
        skipped=guard.skipped + ~good,
        skipped_in_a_row=jnp.where(good, 0, guard.skipped_in_a_row + 1),
    )


def choose(good: jax.Array, new: T, old: T) -> T:
    """Pytree `new` where the step is taken, else `old`, whatever `new` holds."""
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
