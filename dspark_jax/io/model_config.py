"""config.json of targets and drafters, read; for targets also GGUF files. `config_json` writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dspark_jax.config import (
    DrafterConfig,
    DraftingConfig,
    Eagle3Config,
    InputError,
    ModelType,
    MtpConfig,
    Rope,
    SlidingLayers,
    TargetConfig,
    require,
)
from dspark_jax.io import dialects, gguf
from dspark_jax.io.files import read_json

TARGETS: dict[ModelType, str] = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
}
KNOWN_TARGETS: dict[tuple[str, str], ModelType] = {
    ("qwen3", TARGETS["qwen3"]): "qwen3",
    ("llama", TARGETS["llama"]): "llama",
    ("gemma4_text", TARGETS["gemma4"]): "gemma4",
    ("gemma4_unified_text", "Gemma4UnifiedForCausalLM"): "gemma4",
    # Of these, which also see and hear, the part that reads text.
    ("gemma4", "Gemma4ForConditionalGeneration"): "gemma4",
    ("gemma4_unified", "Gemma4UnifiedForConditionalGeneration"): "gemma4",
}
DRAFTERS: dict[tuple[type[DraftingConfig], ModelType], str] = {
    (DrafterConfig, "qwen3"): "Qwen3DSparkModel",
    (DrafterConfig, "gemma4"): "Gemma4DSparkModel",
    (Eagle3Config, "qwen3"): "Qwen3Eagle3Model",
    (MtpConfig, "qwen3"): "Mtp1Model",  # no other engine knows it
}
FULL, SLIDING = "full_attention", "sliding_attention"

LIKE_QWEN3 = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
}
LIKE_GEMMA4 = {
    "attention_bias": False,
    "enable_moe_block": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
"""What is supported of settings that both files and other engines may have otherwise."""


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

    def rope(self, layers: str | None = None) -> Rope:
        """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Those of one kind of `layers`, where these have their own.
        """
        values = self.get("rope_parameters", dict, {}) or self.get("rope_scaling", dict, {})
        beside = self.values.get("rope_theta")
        if beside is not None:
            beside = self._above_zero("rope_theta", beside)
            within = self._above_zero("rope_theta", values.get("rope_theta", beside))
            require(
                within == beside,
                f"{self.path}: rope_theta is {beside!r}, and {within!r} in rope_parameters:"
                " expected one value",
            )
            values = {**values, "rope_theta": beside}
        if layers is not None:
            where = f"{self.path}: rope_parameters"
            require(isinstance(values.get(layers), dict), f"{where}: {layers} is missing in it")
            values = values[layers]
        kind = values.get("rope_type") or values.get("type") or "default"
        require(
            kind in ("default", "llama3", "proportional"),
            f"{self.path}: rope type {kind!r}, expected default, llama3 or proportional",
        )
        names = {
            "rope_theta": "theta",
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_max_position",
            "partial_rotary_factor": "rotated_part",
        }
        given = {
            ours: self._above_zero(theirs, values[theirs])
            for theirs, ours in names.items()
            if theirs in values
        }
        return Rope(scaling=kind, **given)

    def count(self, name: str, default: int) -> int:
        """A whole number above 0."""
        found = self.get(name, int, default)
        self._above_zero(name, found)
        return found

    def _above_zero(self, name: str, value: Any) -> float:
        require(
            type(value) in (int, float) and 0 < value < math.inf,
            f"{self.path}: {name}={value!r}, expected a number above 0",
        )
        return value

    def _norm_eps(self) -> float:
        value = self.get("rms_norm_eps", (float, int), 1e-6)
        return float(self._above_zero("rms_norm_eps", value))

    def expect(self, supported: dict[str, Any]) -> None:
        for name, wanted in supported.items():
            found = self.values.get(name, wanted)
            require(found == wanted, f"{self.path}: {name}={found!r} is not supported")

    def sizes(self, kind: ModelType) -> dict[str, Any]:
        """The fields of `TransformerConfig`; of Gemma4 those of layers that are not sliding."""
        return self._gemma4_sizes() if kind == "gemma4" else self._qwen3_sizes(kind)

    def _gemma4_sizes(self) -> dict[str, Any]:
        self.expect(LIKE_GEMMA4)
        shared = self.get("attention_k_eq_v", bool, False)
        heads = self.get("num_key_value_heads", int)
        if shared:
            heads = self.get("num_global_key_value_heads", int, heads)
        return {
            "model_type": "gemma4",
            "vocab_size": self.get("vocab_size", int),
            "hidden_size": self.get("hidden_size", int),
            "intermediate_size": self.get("intermediate_size", int),
            "num_layers": self.get("num_hidden_layers", int),
            "num_heads": self.get("num_attention_heads", int),
            "num_kv_heads": heads,
            "head_dim": self.get("global_head_dim", int),
            "norm_eps": self._norm_eps(),
            "rope": self.rope(FULL),
            "key_is_value": shared,
        }

    def sliding(self) -> SlidingLayers | None:
        """The sliding layers of Gemma4."""
        kinds = self.get("layer_types", list)
        require(
            len(kinds) == self.get("num_hidden_layers", int) and {*kinds} <= {FULL, SLIDING},
            f"{self.path}: layer_types={kinds!r}, expected {FULL} or {SLIDING} for each layer",
        )
        if SLIDING not in kinds:
            return None
        return SlidingLayers(
            layers=tuple(i for i, kind in enumerate(kinds) if kind == SLIDING),
            window=self.get("sliding_window", int),
            num_kv_heads=self.get("num_key_value_heads", int),
            head_dim=self.get("head_dim", int),
            rope=self.rope(SLIDING),
        )

    def _qwen3_sizes(self, kind: ModelType) -> dict[str, Any]:
        self.expect(LIKE_QWEN3)
        num_heads, width = self.get("num_attention_heads", int), self.get("hidden_size", int)
        return {
            "model_type": kind,
            "vocab_size": self.get("vocab_size", int),
            "hidden_size": width,
            "intermediate_size": self.get("intermediate_size", int),
            "num_layers": self.get("num_hidden_layers", int),
            "num_heads": num_heads,
            "num_kv_heads": self.get("num_key_value_heads", int, num_heads),
            "head_dim": self.get("head_dim", int, width // max(1, num_heads)),
            "norm_eps": self._norm_eps(),
            "rope": self.rope(),
        }

    def build(self, kind: type, **fields: Any) -> Any:
        try:
            return kind(**fields)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from error


def _stop_token_ids(folder: Path, fields: _Fields) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json says more than config.json."""
    path, size = folder / "generation_config.json", fields.get("vocab_size", int)
    found = read_json(path).get("eos_token_id") if path.exists() else None
    if found is None:
        path, found = fields.path, fields.values.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    require(
        all(type(i) is int and 0 <= i < size for i in ids),
        f"{path}: eos_token_id={found!r}, expected an id in 0..{size - 1} or a list of them",
    )
    return tuple(ids)


def load_target_config(folder: Path) -> TargetConfig:
    """Sizes of a target, from a folder or a GGUF file.

    Of a folder config.json is read, and generation_config.json for the stop tokens.
    """
    if gguf.is_gguf(folder):
        return gguf.open_file(folder).config()
    fields = _Fields(folder)
    said = str(fields.values.get("model_type")), fields.architecture()
    require(
        said in KNOWN_TARGETS,
        f"{fields.path}: architecture {said[1]!r} (model_type {said[0]!r}) is not"
        f" known, expected one of {', '.join(name for _, name in KNOWN_TARGETS)}",
    )
    kind, gemma = KNOWN_TARGETS[said], {}
    if kind == "gemma4":
        stop = fields.values.get("eos_token_id")  # also that of the end of a turn
        fields.values |= fields.get("text_config", dict, {})
        if stop is not None:
            fields.values["eos_token_id"] = stop
        if fields.values.get("use_bidirectional_attention") is not None:
            fields.expect({"use_bidirectional_attention": "vision"})  # which is not that of text
        softcap = fields.get("final_logit_softcapping", (float, int), None)
        gemma = {"sliding": fields.sliding(), "logit_softcap": softcap}
    return fields.build(
        TargetConfig,
        **fields.sizes(kind),
        **gemma,
        tie_embeddings=fields.get("tie_word_embeddings", bool, kind == "gemma4"),
        max_position=fields.count("max_position_embeddings", 4096),
        stop_token_ids=_stop_token_ids(folder, fields),
    )


def load_drafter_config(folder: Path) -> DraftingConfig:
    """Reads the config.json of a drafter in any of the layouts of `dialects`, MTP-1 in ours."""
    fields = _Fields(folder)
    fields.values = dialects.to_deepspec(fields.values, str(fields.path))
    named = {name: kind for kind, name in DRAFTERS.items()}
    said = fields.architecture()
    require(
        said in named,
        f"{fields.path}: architecture {said!r} is not known, expected one of {', '.join(named)}",
    )
    kind, layers = named[said]
    require(
        SLIDING not in fields.get("layer_types", list, []),
        f"{fields.path}: layer_types: {SLIDING} is not supported in a drafter",
    )
    if kind is DrafterConfig:
        own = _dspark_fields(fields)
    elif kind is Eagle3Config:
        own = _eagle3_fields(fields)
    else:
        own = {"qk_norm": fields.get("qk_norm", bool)}
    return fields.build(
        kind,
        **fields.sizes(layers),
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
