"""AdamW or Muon with global-norm clipping; learning rate by linear warm-up, then cosine to 0."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from dspark_jax.params import ParamSpec
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


def make_optimizer(settings: OptimizerSettings, specs: Any) -> optax.GradientTransformation:
    """The optimiser of a run; `specs` are those of the trained parameters."""

    def rate(step: jax.Array) -> jax.Array:
        return learning_rate(settings, step)

    if settings.algorithm == "muon":
        update = optax.contrib.muon(
            rate,
            muon_weight_dimension_numbers=muon_matrices(specs),
            adam_b1=settings.beta1,
            adam_b2=settings.beta2,
            weight_decay=settings.weight_decay,
            adam_weight_decay=settings.weight_decay,
            consistent_rms=0.2,
        )
    else:
        update = optax.adamw(
            rate, b1=settings.beta1, b2=settings.beta2, weight_decay=settings.weight_decay
        )
    parts = [optax.clip_by_global_norm(settings.clip_norm), update]
    frozen = jax.tree.map(lambda s: s.frozen, specs)
    if any(jax.tree.leaves(frozen)):
        parts.append(optax.masked(optax.set_to_zero(), frozen))  # weight decay moves them too
    return optax.chain(*parts)


def muon_matrices(specs: Any) -> Any:
    """Which parameters Muon orthogonalises: matrices, inputs first, not those of the vocabulary."""

    def numbers(spec: ParamSpec) -> optax.contrib.MuonDimensionNumbers | None:
        if len(spec.shape) < 2 or "vocab" in spec.axes:
            return None
        outputs = tuple(range(1, len(spec.shape)))
        return optax.contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=outputs)

    return jax.tree.map(numbers, specs)
