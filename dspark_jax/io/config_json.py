"""config.json of targets and drafters, written, in the words in which `model_config` reads it."""

from __future__ import annotations

from typing import Any

from dspark_jax.config import (
    DrafterConfig,
    DraftingConfig,
    Eagle3Config,
    MtpConfig,
    Rope,
    SlidingLayers,
    TargetConfig,
    TransformerConfig,
)
from dspark_jax.io.model_config import DRAFTERS, FULL, LIKE_GEMMA4, SLIDING, TARGETS


def _rope_json(rope: Rope) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.scaling}
    if rope.scaling == "llama3":
        found |= {
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    if rope.scaling == "proportional":
        found["partial_rotary_factor"] = rope.rotated_part
        if rope.factor != 1:
            found["factor"] = rope.factor
    return found


def _shared_json(cfg: TransformerConfig, sliding: SlidingLayers | None) -> dict[str, Any]:
    """What targets and drafters say of their layers, of which the target may have `sliding` ones.

    A drafter repeats what its target says of those, though it has none.
    """
    sizes = {
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_attention_heads": cfg.num_heads,
        "num_hidden_layers": cfg.num_layers,
        "rms_norm_eps": cfg.norm_eps,
        "vocab_size": cfg.vocab_size,
    }
    rope = _rope_json(cfg.rope)
    if not cfg.gemma:
        return {
            **sizes,
            "attention_bias": False,
            "hidden_act": "silu",
            "head_dim": cfg.head_dim,
            "num_key_value_heads": cfg.num_kv_heads,
            "rope_parameters": rope,
            "rope_theta": cfg.rope.theta,  # readers older than transformers 5
            "rope_scaling": rope if cfg.rope.scaling == "llama3" else None,
        }
    near = sliding or SlidingLayers((), 1, cfg.num_kv_heads, cfg.head_dim, cfg.rope)
    return {
        **sizes,
        **LIKE_GEMMA4,
        "attention_k_eq_v": cfg.key_is_value,
        "global_head_dim": cfg.head_dim,
        "num_global_key_value_heads": cfg.num_kv_heads,
        "head_dim": near.head_dim,
        "num_key_value_heads": near.num_kv_heads,
        "sliding_window": near.window,
        "rope_parameters": {FULL: rope, SLIDING: _rope_json(near.rope)},
    }


def target_json(cfg: TargetConfig) -> dict[str, Any]:
    """config.json of a target; of Gemma4 that of its text model alone."""
    found = {
        **_shared_json(cfg, cfg.sliding),
        "architectures": [TARGETS[cfg.model_type]],
        "model_type": cfg.model_type,
        "tie_word_embeddings": cfg.tie_embeddings,
        "max_position_embeddings": cfg.max_position,
        "eos_token_id": list(cfg.stop_token_ids),
    }
    if cfg.gemma:
        windows = [cfg.window(i) for i in range(cfg.num_layers)]
        found |= {
            "model_type": "gemma4_text",
            "final_logit_softcapping": cfg.logit_softcap,
            "layer_types": [FULL if window is None else SLIDING for window in windows],
        }
    return found


def architecture(cfg: DraftingConfig) -> str:
    """The class of a drafter in config.json."""
    return DRAFTERS[type(cfg), cfg.model_type]


def drafter_json(cfg: DraftingConfig, target: TargetConfig) -> dict[str, Any]:
    """The target's configuration with the drafter's own settings over it."""
    own = {
        **_shared_json(cfg, target.sliding),
        "architectures": [architecture(cfg)],
        "model_type": "gemma4_text" if cfg.gemma else "qwen3",
        "tie_word_embeddings": False,
        "layer_types": [FULL] * cfg.num_layers,
        "num_target_layers": cfg.num_target_layers,
        "num_anchors": cfg.num_anchors,
        "enable_confidence_head": cfg.confidence_head,
    }
    if cfg.draft_vocab_size is not None:
        own["draft_vocab_size"] = cfg.draft_vocab_size
    if cfg.confidence_head:
        own["confidence_head_with_markov"] = False
    match cfg:
        case DrafterConfig():
            own |= {
                "block_size": cfg.block_size,
                "mask_token_id": cfg.mask_token_id,
                "target_layer_ids": list(cfg.target_layer_ids),
                "markov_rank": cfg.markov_rank,
            }
            if cfg.head != "none":
                own["markov_head_type"] = cfg.head
            if cfg.confidence_head:
                own["confidence_head_with_markov"] = cfg.confidence_with_markov
        case Eagle3Config():
            own |= {
                "draft_num_hidden_layers": cfg.num_layers,
                "target_layer_ids": list(cfg.target_layer_ids),
                "ttt_length": cfg.block_size,
                "step_loss_decay": cfg.step_loss_decay,
            }
        case MtpConfig():
            own |= {"model_type": "mtp1", "qk_norm": cfg.qk_norm}
    if cfg.gemma:
        own |= {"target_model_type": "gemma4", "target_text_model_type": "gemma4_text"}
    return {**target_json(target), **own}
