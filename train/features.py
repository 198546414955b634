"""Where the target's hidden states come from: computed in the step, or stored before.

Online, the frozen target reads the batch in the step that learns from it. Stored, its states lie
beside the tokens (`train.cache` has written them), and of the target the embedding and the LM head
alone are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax

from dspark_jax import sharding
from dspark_jax.config import TargetConfig
from dspark_jax.self_attention import AttentionKind, make_self_attention
from dspark_jax.sharding import AnyMesh
from dspark_jax.targets import dense
from dspark_jax.targets.dense import Hidden, Target
from dspark_jax.transformer import Layer

FeatureSource = Literal["online", "stored"]
States = Callable[[Target, jax.Array, jax.Array | None, Hidden | None], Hidden]


def make_states(
    source: FeatureSource,
    cfg: TargetConfig,
    taps: tuple[int, ...],
    *,
    attention: AttentionKind,
    mesh: AnyMesh,
) -> States:
    """Hidden states of a batch, of (target, tokens [B, S], segments, stored ones), not jitted.

    Of the target, what `fetch_ends` gives. The states have its dtype; `stored` is used by a source
    of this name alone: `features` [B, S, L * D] of the layers `taps`, and `final` [B, S, D].
    """
    if source == "stored":
        return _stored
    attend = make_self_attention(attention, mesh)
    layers = dense.specs(cfg).layers
    assert isinstance(layers, tuple)

    def fetch_layer(layer: Layer, index: int) -> Layer:
        return sharding.fetched(layer, layers[index], mesh)

    def online(target: Target, tokens, segments, stored) -> Hidden:
        return dense.forward(
            target, tokens, segments, cfg=cfg, taps=taps, attend=attend, fetch=fetch_layer
        )

    return online


def _stored(target: Target, tokens, segments, stored: Hidden | None) -> Hidden:
    assert stored is not None
    return jax.tree.map(lambda x: x.astype(target.embed.dtype), stored)


def fetch_ends(target: Target, cfg: TargetConfig, mesh: AnyMesh) -> Target:
    """With embedding and LM head where they are used; layers are fetched when it is their turn."""
    specs = dense.specs(cfg)
    embed, lm_head = sharding.fetched(
        (target.embed, target.lm_head), (specs.embed, specs.lm_head), mesh
    )
    return dataclasses.replace(target, embed=embed, lm_head=lm_head)
