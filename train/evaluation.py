"""What a drafter in training is worth: on held-out rows, and in decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax import generation, losses, sharding
from dspark_jax.drafters.kinds import AnyDrafter
from dspark_jax.generation import Pair
from dspark_jax.io.tokenizer import Tokenizer
from dspark_jax.losses import Sums
from dspark_jax.request import Request
from dspark_jax.state import Models
from dspark_jax.targets import dense
from dspark_jax.targets.dense import Target
from dspark_jax.vocabulary import with_vocabulary
from train import hosts
from train.step import Batch, StepConfig, draw_anchors, make_sums

SCORE = "expected_accepted_length"
"""The metric that tells the best checkpoints."""


class HeldOut:
    """Batches that are not trained on; the same ones, with the same anchors, at each evaluation."""

    def __init__(self, cfg: StepConfig, mesh: Mesh, batches: Sequence[Batch]):
        self.batches = batches
        self._cfg, self._mesh = cfg, mesh
        sums_of = make_sums(cfg, mesh)

        def evaluate(params: AnyDrafter, target: Target, batch: Batch, number: jax.Array) -> Sums:
            key = jax.random.fold_in(jax.random.key(cfg.seed), number)
            return sums_of(params, target, batch, *draw_anchors(cfg, key, batch))

        self._sums: Callable[..., Sums] = jax.jit(evaluate, out_shardings=sharding.replicated(mesh))

    def metrics(self, params: AnyDrafter, target: Target) -> dict[str, float]:
        """What `losses.metrics` says of them: accepted length by slot, calibration error, ..."""
        total = Sums.zeros(self._cfg.drafter.block_size)
        for number, batch in enumerate(self.batches):
            placed = hosts.global_batch(self._mesh, hosts.own_rows(self._mesh, batch))
            total = losses.add(total, self._sums(params, target, placed, np.int32(number)))
        found = losses.metrics(jax.device_get(total), self._cfg.drafter, self._cfg.loss)
        return {name: float(value) for name, value in found.items()}


def prompts(batches: Sequence[Batch], number: int) -> list[list[int]]:
    """How the first documents of `number` rows begin: up to what is learnt, or a half where all of
    it is."""
    found = []
    for batch in batches:
        learnt = np.asarray(batch.loss_mask)
        if batch.segments is not None:
            learnt = learnt & (batch.segments == batch.segments[:, :1])
        for tokens, mask in zip(np.asarray(batch.tokens), learnt, strict=True):
            inside = np.flatnonzero(mask)
            end = int(inside[0]) or (int(inside[-1]) + 1) // 2
            found.append(tokens[:end].tolist())
    return found[:number]


def decode(
    cfg: StepConfig,
    mesh: Mesh,
    params: AnyDrafter,
    target: Target,
    tokenizer: Tokenizer,
    starts: Sequence[Sequence[int]],
    *,
    tokens: int,
) -> dict[str, float]:
    """Continues prompts at temperature 1 with every draft verified, on the mesh.

    `decoding_accepted_length` is the mean over rounds that were not cut, NaN without any. Layers
    that are stacked are copied for it.
    """
    dtype = target.embed.dtype
    drafter = jax.tree.map(lambda x: x.astype(dtype), params)
    models = Models(
        target=dense.unstack_layers(target),
        drafter=with_vocabulary(drafter, target, cfg.draft_ids),
        target_config=dataclasses.replace(
            cfg.target, stop_token_ids=cfg.target.stop_token_ids or tokenizer.eos_ids
        ),
        drafter_config=cfg.drafter,
        mesh=mesh if mesh.size > 1 else None,
    )
    requests = [
        Request(start, max_new_tokens=tokens, temperature=1.0, seed=cfg.seed, stream=number)
        for number, start in enumerate(starts)
    ]
    completions = generation.generate(Pair(models, tokenizer), requests, slots=len(requests))
    rounds = [n for completion in completions for n in completion.full_rounds]
    return {
        "decoding_accepted_length": sum(rounds) / len(rounds) if rounds else float("nan"),
        "decoding_rounds": len(rounds),
    }
