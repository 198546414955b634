"""Layouts of checkpoints: which tensors make up a parameter, and how.

A layout is a pytree of `Codec`s of the same structure as the parameters. Loading and saving read
the same one, so that a round trip is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dspark_jax.config import (
    DrafterConfig,
    DraftingConfig,
    MtpConfig,
    RecurrentConfig,
    TargetConfig,
    TransformerConfig,
)
from dspark_jax.drafters import dspark, heads, recurrent
from dspark_jax.drafters.confidence import Confidence
from dspark_jax.drafters.kinds import AnyDrafter
from dspark_jax.layers import Mlp
from dspark_jax.targets import dense
from dspark_jax.transformer import Layer


@dataclasses.dataclass(frozen=True)
class Codec:
    """How the tensors `names` make up one parameter."""

    names: tuple[str, ...]
    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    split: Callable[[np.ndarray], Sequence[np.ndarray]]

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes of the tensors of a parameter of this shape."""
        return [t.shape for t in self.split(np.broadcast_to(np.float32(0), shape))]


# The functions that make codecs are typed so that these may stand in the place of arrays.


def _plain(name: str) -> Any:
    return Codec((name,), lambda t: t[0], lambda p: [p])


def _linear(name: str) -> Any:
    return Codec((name,), lambda t: t[0].T, lambda p: [p.T])


def _vector(name: str) -> Any:
    """A linear map to one number: [1, in] as [in]."""
    return Codec((name,), lambda t: t[0][0], lambda p: [p[None]])


def _scalar(name: str) -> Any:
    return Codec((name,), lambda t: t[0][0], lambda p: [p[None]])


def _gate_up(prefix: str) -> Any:
    """Gate and up [F, D] as [D, 2, F]."""
    return Codec(
        (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"),
        lambda t: np.stack([t[0].T, t[1].T], axis=1),
        lambda p: [p[:, 0].T, p[:, 1].T],
    )


def _qkv(prefix: str, cfg: TransformerConfig) -> Any:
    """q [G * M * H, W], k and v [G * H, W] as [W, G, M + 2, H]; no v where the key is the value.

    W is D, or 2 D for Eagle3.
    """
    g, m, h = cfg.num_kv_heads, cfg.group_size, cfg.head_dim

    def join(tensors):
        parts = [t.T.reshape(t.shape[1], g, -1, h) for t in tensors]
        return np.concatenate(parts, axis=2)

    def split(param):
        parts = [param[:, :, :m], *(param[:, :, m + i] for i in range(len(names) - 1))]
        return [part.reshape(part.shape[0], -1).T for part in parts]

    names = "qk" if cfg.key_is_value else "qkv"
    return Codec(tuple(f"{prefix}{x}_proj.weight" for x in names), join, split)


def _layer(prefix: str, cfg: TransformerConfig, *, qk_norm: bool) -> Layer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    # Gemma4 gives this name to the norm of what attention adds.
    before_mlp = "pre_feedforward_layernorm" if cfg.gemma else "post_attention_layernorm"
    return Layer(
        attn_norm=_plain(f"{prefix}input_layernorm.weight"),
        qkv=_qkv(attention, cfg),
        q_norm=_plain(f"{attention}q_norm.weight") if qk_norm else None,
        k_norm=_plain(f"{attention}k_norm.weight") if qk_norm else None,
        out=_linear(f"{attention}o_proj.weight"),
        mlp_norm=_plain(f"{prefix}{before_mlp}.weight"),
        mlp=Mlp(gate_up=_gate_up(mlp), down=_linear(f"{mlp}down_proj.weight")),
        attn_post_norm=_plain(f"{prefix}post_attention_layernorm.weight") if cfg.gemma else None,
        mlp_post_norm=_plain(f"{prefix}post_feedforward_layernorm.weight") if cfg.gemma else None,
        scalar=_scalar(f"{prefix}layer_scalar") if cfg.gemma else None,
    )


TEXT, NESTED_TEXT = "model.", "model.language_model."
"""Where the tensors of a target are, and where they are if it is a part of one that also sees."""


def target_layout(cfg: TargetConfig, prefix: str = TEXT) -> dense.Target:
    """Codecs of a target's parameters."""
    layers = [(f"{prefix}layers.{i}.", cfg.layer(i)) for i in range(cfg.num_layers)]
    return dense.Target(
        embed=_plain(f"{prefix}embed_tokens.weight"),
        layers=tuple(_layer(name, kind, qk_norm=kind.qk_norm) for name, kind in layers),
        norm=_plain(f"{prefix}norm.weight"),
        lm_head=None if cfg.tie_embeddings else _linear("lm_head.weight"),
    )


def drafter_layout(cfg: DraftingConfig) -> AnyDrafter:
    """Codecs of a drafter's own parameters: the DeepSpec layout, or for MTP-1 one of ours."""
    match cfg:
        case DrafterConfig():
            return _dspark_layout(cfg)
        case MtpConfig():
            return _mtp_layout(cfg)
        case RecurrentConfig():
            return _eagle3_layout(cfg)
    raise TypeError(f"{type(cfg).__name__} has no layout")


def _dspark_layout(cfg: DrafterConfig) -> dspark.Drafter:
    return dspark.Drafter(
        fc=_linear("fc.weight"),
        context_norm=_plain("hidden_norm.weight"),
        layers=tuple(_layer(f"layers.{i}.", cfg, qk_norm=True) for i in range(cfg.num_layers)),
        norm=_plain("norm.weight"),
        head=_head_layout(cfg),
        confidence=_confidence_layout(cfg),
    )


def _eagle3_layout(cfg: RecurrentConfig) -> recurrent.Eagle3:
    return recurrent.Eagle3(
        fc=_linear("fc.weight"),
        hidden_norm=_plain("layers.0.hidden_norm.weight"),
        layer=_layer("layers.0.", cfg, qk_norm=True),
        norm=_plain("norm.weight"),
        confidence=_confidence_layout(cfg),
    )


def _mtp_layout(cfg: MtpConfig) -> recurrent.Mtp:
    """Matrices are as everywhere [out, in]; the input of `proj` is [hidden state; embedding]."""
    return recurrent.Mtp(
        hidden_norm=_plain("hidden_norm.weight"),
        embed_norm=_plain("embed_norm.weight"),
        join=_linear("proj.weight"),
        layer=_layer("layers.0.", cfg, qk_norm=cfg.qk_norm),
        norm=_plain("norm.weight"),
        confidence=_confidence_layout(cfg),
    )


def _confidence_layout(cfg: DraftingConfig) -> Confidence | None:
    if not cfg.confidence_head:
        return None
    weight, bias = "confidence_head.proj.weight", "confidence_head.proj.bias"
    return Confidence(weight=_vector(weight), bias=_scalar(bias))


def _head_layout(cfg: DrafterConfig) -> heads.Markov | None:
    token = {
        "w1": _plain("markov_head.markov_w1.weight"),
        "w2": _linear("markov_head.markov_w2.weight"),
    }
    match cfg.head:
        case "vanilla":
            return heads.Markov(**token)
        case "gated":
            gate, bias = "markov_head.gate_proj.weight", "markov_head.gate_proj.bias"
            return heads.Gated(**token, gate=_linear(gate), gate_bias=_plain(bias))
        case "rnn":
            joint, bias = "markov_head.joint_proj.weight", "markov_head.joint_proj.bias"
            return heads.Rnn(**token, joint=_linear(joint), joint_bias=_plain(bias))
        case "none":
            return None


def draft_head_layout() -> Any:
    """Codec of the LM head [D, Vd] of a pruned draft vocabulary."""
    return _linear("lm_head.weight")


def export(layout: Any, params: Any) -> dict[str, np.ndarray]:
    """The tensors of `params` by name, as `layout` says."""
    tensors = {}
    for codec, value in zip(jax.tree.leaves(layout), jax.tree.leaves(params), strict=True):
        parts = codec.split(np.asarray(value))
        tensors |= {n: np.ascontiguousarray(t) for n, t in zip(codec.names, parts, strict=True)}
    return tensors
