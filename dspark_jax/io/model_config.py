"""config.json of targets and drafters, read and written; for targets also GGUF files, read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark_jax.config import (
    DrafterConfig,
    DraftingConfig,
    Eagle3Config,
    InputError,
    MtpConfig,
    Rope,
    TargetConfig,
    TransformerConfig,
    require,
)
from dspark_jax.io import gguf
from dspark_jax.io.files import read_json

TARGETS = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
DRAFTERS: dict[type[DraftingConfig], str] = {
    DrafterConfig: "Qwen3DSparkModel",
    Eagle3Config: "Qwen3Eagle3Model",
    MtpConfig: "Mtp1Model",  # no other engine knows it
}


class _Fields:
    """Typed access to config.json; what is missing or of another kind is an `InputError`."""

    def __init__(self, folder: Path):
        self.path = folder / "config.json"
        require(folder.is_dir(), f"{folder}: expected a folder")
        require(self.path.exists(), f"{folder}: no config.json in this folder")
        self.values = read_json(self.path)

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        require(value is not ..., f"{self.path}: {name} is missing")
        wanted = kind if isinstance(kind, tuple) else (kind,)
        fits = isinstance(value, wanted) and (bool in wanted or not isinstance(value, bool))
        names = " or ".join(k.__name__ for k in wanted)
        require(fits or value is default, f"{self.path}: {name}={value!r}, expected {names}")
        return value

    def ints(self, name: str, default: Any = ...) -> tuple[int, ...]:
        value = self.get(name, list, default)
        require(
            all(isinstance(x, int) and not isinstance(x, bool) for x in value),
            f"{self.path}: {name}={value!r}, expected a list of whole numbers",
        )
        return tuple(value)

    def architecture(self) -> str:
        names = self.get("architectures", list)
        return str(names[0]) if names else ""

    def rope(self) -> Rope:
        """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
        values = self.get("rope_parameters", dict, {}) or {
            "rope_theta": self.values.get("rope_theta", 10_000.0),
            **self.get("rope_scaling", dict, {}),
        }
        kind = values.get("rope_type") or values.get("type") or "default"
        require(
            kind in ("default", "llama3"),
            f"{self.path}: rope type {kind!r}, expected default or llama3",
        )
        names = {
            "rope_theta": "theta",
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_max_position",
        }
        given = {ours: values[theirs] for theirs, ours in names.items() if theirs in values}
        for name, value in given.items():
            require(
                isinstance(value, int | float) and value > 0,
                f"{self.path}: rope {name}={value!r}, expected a number above 0",
            )
        return Rope(scaling=kind, **given)

    def sizes(self) -> dict[str, Any]:
        """The fields of `TransformerConfig`."""
        for name, wanted in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu"),
                             ("use_sliding_window", False)):  # fmt: skip
            found = self.values.get(name, wanted)
            require(found == wanted, f"{self.path}: {name}={found!r} is not supported")
        num_heads, width = self.get("num_attention_heads", int), self.get("hidden_size", int)
        return {
            "vocab_size": self.get("vocab_size", int),
            "hidden_size": width,
            "intermediate_size": self.get("intermediate_size", int),
            "num_layers": self.get("num_hidden_layers", int),
            "num_heads": num_heads,
            "num_kv_heads": self.get("num_key_value_heads", int, num_heads),
            "head_dim": self.get("head_dim", int, width // max(1, num_heads)),
            "norm_eps": float(self.get("rms_norm_eps", (float, int), 1e-6)),
            "rope": self.rope(),
        }

    def build(self, kind: type, **fields: Any) -> Any:
        try:
            return kind(**fields)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from error


def _stop_token_ids(folder: Path, fields: _Fields) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json says more than config.json."""
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.exists() else None
    found = fields.values.get("eos_token_id") if found is None else found
    ids = found if isinstance(found, list) else [] if found is None else [found]
    require(all(isinstance(i, int) for i in ids), f"{folder}: eos_token_id={found!r}, expected ids")
    return tuple(ids)


def load_target_config(folder: Path) -> TargetConfig:
    """Sizes of a target, from a folder or a GGUF file.

    Of a folder config.json is read, and generation_config.json for the stop tokens.
    """
    if gguf.is_gguf(folder):
        return gguf.open_file(folder).config()
    fields = _Fields(folder)
    kind = fields.values.get("model_type")
    known = isinstance(kind, str) and TARGETS.get(kind) == fields.architecture()
    require(
        known,
        f"{fields.path}: architecture {fields.architecture()!r} (model_type {kind!r}) is not"
        f" known, expected one of {', '.join(TARGETS.values())}",
    )
    return fields.build(
        TargetConfig,
        **fields.sizes(),
        model_type=kind,
        tie_embeddings=fields.get("tie_word_embeddings", bool, False),
        max_position=fields.get("max_position_embeddings", int, 4096),
        stop_token_ids=_stop_token_ids(folder, fields),
    )


def load_drafter_config(folder: Path) -> DraftingConfig:
    """Reads the config.json of a drafter in the DeepSpec layout, or in ours for MTP-1."""
    fields = _Fields(folder)
    named = {name: kind for kind, name in DRAFTERS.items()}
    kind = named.get(fields.architecture())
    if kind is None:
        raise InputError(
            f"{fields.path}: architecture {fields.architecture()!r} is not known, expected one of"
            f" {', '.join(named)}"
        )
    if kind is DrafterConfig:
        own = _dspark_fields(fields)
    elif kind is Eagle3Config:
        own = _eagle3_fields(fields)
    else:
        own = {"qk_norm": fields.get("qk_norm", bool)}
    return fields.build(
        kind,
        **fields.sizes(),
        num_target_layers=fields.get("num_target_layers", int),
        confidence_head=fields.get("enable_confidence_head", bool, False),
        num_anchors=fields.get("num_anchors", int, 512),
        draft_vocab_size=_draft_vocab_size(fields),
        **own,
    )


def _draft_vocab_size(fields: _Fields) -> int | None:
    """None also where it is that of the target, as other engines write it."""
    size = fields.get("draft_vocab_size", int, None)
    return None if size == fields.get("vocab_size", int) else size


def _dspark_fields(fields: _Fields) -> dict[str, Any]:
    rank = fields.get("markov_rank", int, 0)
    return {
        "block_size": fields.get("block_size", int),
        "mask_token_id": fields.get("mask_token_id", int),
        "target_layer_ids": fields.ints("target_layer_ids"),
        "head": fields.get("markov_head_type", str, "vanilla") if rank else "none",
        "markov_rank": rank,
        "confidence_with_markov": fields.get("confidence_head_with_markov", bool, rank > 0),
    }


def _eagle3_fields(fields: _Fields) -> dict[str, Any]:
    layers = fields.get("draft_num_hidden_layers", int, 1)
    require(
        layers == 1, f"{fields.path}: draft_num_hidden_layers={layers}: expected 1, the only layer"
    )
    with_markov = fields.get("confidence_head_with_markov", bool, False)
    require(
        not with_markov,
        f"{fields.path}: confidence_head_with_markov=true: expected false, there is no Markov head",
    )
    return {
        "block_size": fields.get("ttt_length", int),
        "target_layer_ids": fields.ints("target_layer_ids"),
        "step_loss_decay": float(fields.get("step_loss_decay", (float, int), 0.8)),
    }


def _shared_json(cfg: TransformerConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": cfg.rope.theta, "rope_type": cfg.rope.scaling}
    if cfg.rope.scaling == "llama3":
        rope |= {
            "factor": cfg.rope.factor,
            "low_freq_factor": cfg.rope.low_freq_factor,
            "high_freq_factor": cfg.rope.high_freq_factor,
            "original_max_position_embeddings": cfg.rope.original_max_position,
        }
    return {
        "attention_bias": False,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_attention_heads": cfg.num_heads,
        "num_hidden_layers": cfg.num_layers,
        "num_key_value_heads": cfg.num_kv_heads,
        "rms_norm_eps": cfg.norm_eps,
        "rope_parameters": rope,
        "rope_theta": cfg.rope.theta,  # readers older than transformers 5
        "rope_scaling": rope if cfg.rope.scaling == "llama3" else None,
        "vocab_size": cfg.vocab_size,
    }


def target_json(cfg: TargetConfig) -> dict[str, Any]:
    return {
        **_shared_json(cfg),
        "architectures": [TARGETS[cfg.model_type]],
        "model_type": cfg.model_type,
        "tie_word_embeddings": cfg.tie_embeddings,
        "max_position_embeddings": cfg.max_position,
        "eos_token_id": list(cfg.stop_token_ids),
    }


def drafter_json(cfg: DraftingConfig, target: TargetConfig) -> dict[str, Any]:
    """The target's configuration with the drafter's own settings over it."""
    own = {
        **_shared_json(cfg),
        "architectures": [DRAFTERS[type(cfg)]],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * cfg.num_layers,
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
    return {**target_json(target), **own}
