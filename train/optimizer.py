"""AdamW with global-norm clipping; learning rate by linear warm-up, then cosine to 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from train.settings import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: jax.Array | int) -> jax.Array:
    """Learning rate of the update number `step`, from 0.

    Rises in equal parts to the peak, which the last update of the warm-up and the first of the
    cosine both have; would be 0 at `step == settings.steps`. The whole curve stays within the peak.
    """
    count = jnp.asarray(step, jnp.float32)
    warmup = min(round(settings.warmup_fraction * settings.steps), settings.steps - 1)
    rising = (count + 1) / max(warmup, 1)
    done = jnp.clip((count - warmup) / max(settings.steps - warmup, 1), 0, 1)
    falling = 0.5 * (1 + jnp.cos(jnp.pi * done))
    return settings.learning_rate * jnp.where(count < warmup, rising, falling)


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """The optimiser of a run."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            lambda step: learning_rate(settings, step),
            b1=settings.beta1,
            b2=settings.beta2,
            weight_decay=settings.weight_decay,
        ),
    )
