"""Hugging Face folders: targets in, drafters in and out.

A model's layout is a pytree of `Codec`s of the same structure as its parameters: each says which
tensors make up a parameter, how they are joined, and how they come apart again. Loading and saving
read the same layout, so that a round trip is exact.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dspark_jax.config import (
    DrafterConfig,
    InputError,
    Rope,
    TargetConfig,
    TransformerConfig,
    require,
)
from dspark_jax.drafters import dspark, heads
from dspark_jax.drafters.confidence import Confidence
from dspark_jax.layers import Mlp
from dspark_jax.targets import dense
from dspark_jax.transformer import Layer

log = logging.getLogger(__name__)

TARGETS = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
DRAFTER = "Qwen3DSparkModel"


# --- Tensors ---------------------------------------------------------------------------------


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
    """q [G * M * H, D], k and v [G * H, D] as [D, G, M + 2, H]."""
    g, m, h, d = cfg.num_kv_heads, cfg.group_size, cfg.head_dim, cfg.hidden_size

    def join(tensors):
        parts = [t.T.reshape(d, g, -1, h) for t in tensors]
        return np.concatenate(parts, axis=2)

    def split(param):
        parts = param[:, :, :m], param[:, :, m], param[:, :, m + 1]
        return [part.reshape(d, -1).T for part in parts]

    return Codec(tuple(f"{prefix}{x}_proj.weight" for x in "qkv"), join, split)


def _layer(prefix: str, cfg: TransformerConfig, *, qk_norm: bool) -> Layer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return Layer(
        attn_norm=_plain(f"{prefix}input_layernorm.weight"),
        qkv=_qkv(attention, cfg),
        q_norm=_plain(f"{attention}q_norm.weight") if qk_norm else None,
        k_norm=_plain(f"{attention}k_norm.weight") if qk_norm else None,
        out=_linear(f"{attention}o_proj.weight"),
        mlp_norm=_plain(f"{prefix}post_attention_layernorm.weight"),
        mlp=Mlp(gate_up=_gate_up(mlp), down=_linear(f"{mlp}down_proj.weight")),
    )


def target_layout(cfg: TargetConfig) -> dense.Target:
    """Codecs of a target's parameters."""
    return dense.Target(
        embed=_plain("model.embed_tokens.weight"),
        layers=tuple(
            _layer(f"model.layers.{i}.", cfg, qk_norm=cfg.qk_norm) for i in range(cfg.num_layers)
        ),
        norm=_plain("model.norm.weight"),
        lm_head=None if cfg.tie_embeddings else _linear("lm_head.weight"),
    )


def drafter_layout(cfg: DrafterConfig) -> dspark.Drafter:
    """Codecs of a drafter's own parameters in the DeepSpec layout."""
    return dspark.Drafter(
        fc=_linear("fc.weight"),
        context_norm=_plain("hidden_norm.weight"),
        layers=tuple(_layer(f"layers.{i}.", cfg, qk_norm=True) for i in range(cfg.num_layers)),
        norm=_plain("norm.weight"),
        head=_head_layout(cfg),
        confidence=Confidence(
            weight=_vector("confidence_head.proj.weight"), bias=_scalar("confidence_head.proj.bias")
        )
        if cfg.confidence_head
        else None,
    )


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


def export(layout: Any, params: Any) -> dict[str, np.ndarray]:
    """The tensors of `params` by name, as `layout` says."""
    tensors = {}
    for codec, value in zip(jax.tree.leaves(layout), jax.tree.leaves(params), strict=True):
        parts = codec.split(np.asarray(value))
        tensors |= {n: np.ascontiguousarray(t) for n, t in zip(codec.names, parts, strict=True)}
    return tensors


class Tensors:
    """The safetensors files of a folder: one file, or shards with an index."""

    def __init__(self, folder: Path):
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self._file_of = _weight_map(index)
        else:
            name = "model.safetensors"
            require((folder / name).exists(), f"{folder}: expected {name} or {index.name} in it")
            self._file_of = dict.fromkeys(self._open(name).keys(), name)
        self._files = {name: self._open(name) for name in sorted(set(self._file_of.values()))}

    def _open(self, name: str):
        path = self.folder / name
        require(path.exists(), f"{path}: shard is missing, but the index names it")
        try:
            return safe_open(path, framework="numpy")
        except SafetensorError as error:
            raise InputError(f"{path}: not a whole safetensors file ({error})") from error

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """One tensor, which must have this shape."""
        require(name in self, f"{self.folder}: tensor {name} is missing")
        path = self.folder / self._file_of[name]
        file = self._files[path.name]
        require(
            name in file.keys(),  # noqa: SIM118 (not a dict)
            f"{path}: tensor {name} is missing, but the index names it",
        )
        found = tuple(file.get_slice(name).get_shape())
        require(
            found == shape,
            f"{self.folder}: tensor {name} has shape {list(found)}, expected {list(shape)}",
        )
        return file.get_tensor(name)


def _weight_map(index: Path) -> dict[str, str]:
    """File of each tensor, all in the folder of the index itself."""
    found = read_json(index).get("weight_map")
    valid = isinstance(found, dict) and all(
        isinstance(file, str) and Path(file).name == file for file in found.values()
    )
    if not valid:
        raise InputError(f"{index}: expected a weight_map of tensors to files beside it")
    return found


def _load(tensors: Tensors, specs: Any, layout: Any, dtype: Any, shardings: Any) -> Any:
    """Parameters one by one: the host never holds more than one of them beside the devices."""

    def load(spec, codec, sharding):
        shapes = codec.shapes(spec.shape)
        parts = [tensors.read(n, s) for n, s in zip(codec.names, shapes, strict=True)]
        value = np.asarray(codec.join(parts), dtype=dtype, order="C")  # keeps a scalar a scalar
        return jax.device_put(value, sharding)

    leaves, treedef = jax.tree.flatten(specs)
    places = [None] * len(leaves) if shardings is None else treedef.flatten_up_to(shardings)
    values = [load(*x) for x in zip(leaves, jax.tree.leaves(layout), places, strict=True)]
    return jax.tree.unflatten(treedef, values)


def _report_extra(tensors: Tensors, layout: Any, *, known: Iterable[str]) -> None:
    used = {name for codec in jax.tree.leaves(layout) for name in codec.names}
    extra = sorted(tensors.names() - used - set(known))
    extra = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]
    if extra:
        log.warning("%s: ignoring unknown tensors %s", tensors.folder, ", ".join(extra))


# --- config.json -----------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else in it is an `InputError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error
    require(isinstance(value, dict), f"{path}: expected a JSON object")
    return value


class _Fields:
    """Typed access to config.json; what is missing or of another kind is an `InputError`."""

    def __init__(self, folder: Path):
        self.path = folder / "config.json"
        require(folder.is_dir(), f"{folder}: no such folder")
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
    """Reads a target's config.json (and generation_config.json for its stop tokens)."""
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


def load_drafter_config(folder: Path) -> DrafterConfig:
    """Reads the config.json of a drafter in the DeepSpec layout."""
    fields = _Fields(folder)
    require(
        fields.architecture() == DRAFTER,
        f"{fields.path}: architecture {fields.architecture()!r} is not known, expected {DRAFTER}",
    )
    rank = fields.get("markov_rank", int, 0)
    return fields.build(
        DrafterConfig,
        **fields.sizes(),
        block_size=fields.get("block_size", int),
        mask_token_id=fields.get("mask_token_id", int),
        target_layer_ids=fields.ints("target_layer_ids"),
        num_target_layers=fields.get("num_target_layers", int),
        head=fields.get("markov_head_type", str, "vanilla") if rank else "none",
        markov_rank=rank,
        confidence_head=fields.get("enable_confidence_head", bool, False),
        confidence_with_markov=fields.get("confidence_head_with_markov", bool, rank > 0),
        num_anchors=fields.get("num_anchors", int, 512),
    )


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


def _target_json(cfg: TargetConfig) -> dict[str, Any]:
    return {
        **_shared_json(cfg),
        "architectures": [TARGETS[cfg.model_type]],
        "model_type": cfg.model_type,
        "tie_word_embeddings": cfg.tie_embeddings,
        "max_position_embeddings": cfg.max_position,
        "eos_token_id": list(cfg.stop_token_ids),
    }


def _drafter_json(cfg: DrafterConfig, target: TargetConfig) -> dict[str, Any]:
    """The target's configuration with the drafter's own settings over it."""
    own = {
        **_shared_json(cfg),
        "architectures": [DRAFTER],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * cfg.num_layers,
        "block_size": cfg.block_size,
        "mask_token_id": cfg.mask_token_id,
        "target_layer_ids": list(cfg.target_layer_ids),
        "num_target_layers": cfg.num_target_layers,
        "num_anchors": cfg.num_anchors,
        "markov_rank": cfg.markov_rank,
        "enable_confidence_head": cfg.confidence_head,
    }
    if cfg.head != "none":
        own["markov_head_type"] = cfg.head
    if cfg.confidence_head:
        own["confidence_head_with_markov"] = cfg.confidence_with_markov
    return {**_target_json(target), **own}


# --- Folders ---------------------------------------------------------------------------------


def resolve(name: str | Path) -> Path:
    """A local folder, or a repository id of the Hugging Face hub, downloaded into its cache."""
    path = Path(name)
    is_repository = (
        isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/"))
    )
    if path.exists() or not is_repository:
        require(path.is_dir(), f"{name}: no such folder")
        return path
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise InputError(
            f"{name}: no such folder; to fetch it from the hub install dspark_jax[hub]"
        ) from error
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]
            )
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{name}: no such folder, and the hub said: {reason}") from error


def load_target(
    path: str | Path, *, dtype: Any = jnp.float32, shardings: Any = None
) -> tuple[TargetConfig, dense.Target]:
    """A frozen target from a Hugging Face folder or repository id.

    Args:
      path: folder with config.json and safetensors (one file, or shards with an index).
      dtype: of the parameters, whatever the files hold (bf16, f16, f32).
      shardings: pytree of shardings of `dense.specs(config)`; default: the first device.
    Raises:
      InputError: anything wrong with the folder, in one line.
    """
    folder = resolve(path)
    cfg = load_target_config(folder)
    tensors, layout = Tensors(folder), target_layout(cfg)
    params = _load(tensors, dense.specs(cfg), layout, dtype, shardings)
    _report_extra(tensors, layout, known=("lm_head.weight",))
    return cfg, params


def load_drafter(
    path: str | Path, *, dtype: Any = jnp.float32, shardings: Any = None
) -> tuple[DrafterConfig, dspark.Drafter]:
    """A drafter in the DeepSpec layout; its copies of the target's embedding and head are left.

    A checkpoint that promises a confidence head and lacks its weights is loaded without one, and a
    warning says so. Arguments and errors as for `load_target`.
    """
    folder = resolve(path)
    cfg, tensors = load_drafter_config(folder), Tensors(folder)
    if cfg.confidence_head and "confidence_head.proj.weight" not in tensors:
        log.warning("%s: no confidence weights in it: the confidence head is off", folder)
        cfg = dataclasses.replace(cfg, confidence_head=False)
    layout = drafter_layout(cfg)
    params = _load(tensors, dspark.specs(cfg), layout, dtype, shardings)
    _report_extra(tensors, layout, known=("embed_tokens.weight", "lm_head.weight"))
    return cfg, params


def save_target(
    path: str | Path, config: TargetConfig, params: dense.Target, *, dtype: Any = None
) -> None:
    """Writes a target as a Hugging Face folder; `dtype` defaults to the parameters' own."""
    tensors = _cast(export(target_layout(config), params), dtype)
    _write_folder(Path(path), _target_json(config), tensors)


def save_drafter(
    path: str | Path,
    config: DrafterConfig,
    params: dspark.Drafter,
    *,
    target: tuple[TargetConfig, dense.Target],
    layout: Literal["deepspec"] = "deepspec",
    dtype: Any = None,
) -> None:
    """Writes a drafter for other engines to read.

    Args:
      path: folder; files in it are replaced one by one, each whole or not at all.
      target: what `load_target` gave; its embedding and LM head are written too.
      layout: only "deepspec".
      dtype: of the written tensors; default: the parameters' own.
    """
    require(layout == "deepspec", f"layout={layout!r}: expected 'deepspec'")
    target_config, target_params = target
    config.check_fits(target_config)
    whole = target_layout(target_config)
    shared = export((whole.embed, whole.lm_head), (target_params.embed, target_params.lm_head))
    embed = shared["model.embed_tokens.weight"]
    tensors = export(drafter_layout(config), params)
    tensors |= {"embed_tokens.weight": embed, "lm_head.weight": shared.get("lm_head.weight", embed)}
    _write_folder(Path(path), _drafter_json(config, target_config), _cast(tensors, dtype))


def _cast(tensors: dict[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    return tensors if dtype is None else {n: t.astype(dtype) for n, t in tensors.items()}


def _write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config, "dtype": str(next(iter(tensors.values())).dtype)}
    weights, settings = folder / "model.safetensors.tmp", folder / "config.json.tmp"
    try:
        save_file(tensors, weights, metadata={"format": "pt"})
        settings.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        os.replace(weights, folder / "model.safetensors")
        os.replace(settings, folder / "config.json")
    finally:
        weights.unlink(missing_ok=True)
        settings.unlink(missing_ok=True)
