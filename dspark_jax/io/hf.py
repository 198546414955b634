"""Hugging Face folders: targets in (also from GGUF files), drafters in and out."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dspark_jax.config import DraftingConfig, TargetConfig, require
from dspark_jax.drafters.kinds import AnyDrafter, kind_of
from dspark_jax.io import config_json, dialects, files, layouts, model_config
from dspark_jax.io.dialects import Layout
from dspark_jax.io.gguf import GgufFile
from dspark_jax.io.tensors import (
    Place,
    Tensors,
    load_parameters,
    open_tensors,
    report_extra,
    require_finite,
)
from dspark_jax.params import spec
from dspark_jax.targets import dense
from dspark_jax.vocabulary import Vocabulary, columns, from_offsets

log = logging.getLogger(__name__)


def load_target(
    path: str | Path,
    *,
    dtype: Any = jnp.float32,
    place: Place | None = None,
    layers: bool = True,
) -> tuple[TargetConfig, dense.Target]:
    """A frozen target from a Hugging Face folder or repository id, or a GGUF file.

    Args:
      path: folder with config.json and safetensors (one file, or shards with an index), or a name
        that ends in .gguf.
      dtype: of the parameters, whatever the files hold (bf16, f16, f32).
      place: shardings of a pytree of parameter specs, as `sharding.parameters` gives them; default:
        the first device.
      layers: without, they are left in the files, and the target has none.
    Raises:
      InputError: anything wrong with the files, in one line.
    """
    folder = files.resolve(path)
    cfg, tensors = model_config.load_target_config(folder), open_tensors(folder)
    prefix = text_prefix(tensors)
    layout = layouts.target_layout(cfg, prefix)
    specs, wanted = dense.specs(cfg), layout
    if not layers:
        specs, wanted = (dataclasses.replace(x, layers=()) for x in (specs, layout))
    params = load_parameters(tensors, specs, wanted, dtype, place)
    ours = prefix if prefix == layouts.NESTED_TEXT else ""  # what sees and hears is left
    report_extra(tensors, layout, known=("lm_head.weight",), within=ours)
    return cfg, params


def text_prefix(tensors: Tensors | GgufFile) -> str:
    """What the names of a target's tensors begin with."""
    nested = f"{layouts.NESTED_TEXT}embed_tokens.weight" in tensors
    return layouts.NESTED_TEXT if nested else layouts.TEXT


def load_drafter(
    path: str | Path,
    *,
    target: dense.Target | None = None,
    dtype: Any = jnp.float32,
    place: Place | None = None,
) -> tuple[DraftingConfig, AnyDrafter]:
    """A drafter in any of the layouts of `dialects`, without its copies of embedding and head.

    MTP-1 has a layout of ours.

    A checkpoint that promises a confidence head and lacks its weights is loaded without one, and a
    warning says so. Arguments and errors as for `load_target`.

    Args:
      target: whose LM head a pruned vocabulary has where it was written without one.
    """
    folder = files.resolve(path)
    cfg, tensors = model_config.load_drafter_config(folder), Tensors(folder)
    if cfg.confidence_head and "confidence_head.proj.weight" not in tensors:
        log.warning("%s: no confidence weights in it: the confidence head is off", folder)
        cfg = dataclasses.replace(cfg, confidence_head=False)
    known, vocabulary = ["embed_tokens.weight", "lm_head.weight"], None
    require(
        cfg.draft_vocab_size is not None or "d2t" not in tensors,
        f"{tensors.path}: d2t in it, and no draft_vocab_size below vocab_size in its config.json;"
        " expected both or neither",
    )
    if cfg.draft_vocab_size is not None:
        known += ["d2t", "t2d"]
        vocabulary = _load_vocabulary(tensors, cfg, target, dtype, place)
    layout = layouts.drafter_layout(cfg)
    wanted = {name for codec in jax.tree.leaves(layout) for name in codec.names}
    heads = sorted(n for n in tensors.names() - wanted if n.startswith("markov_head."))
    require(
        not heads,
        f"{tensors.path}: {', '.join(heads)} in it, expected a sequential head that has it"
        " (markov_head_type and markov_rank in config.json)",
    )
    params = load_parameters(tensors, kind_of(cfg).specs(cfg), layout, dtype, place)
    require_finite(tensors.path, params, layout)
    params = dataclasses.replace(params, vocabulary=vocabulary)
    report_extra(tensors, layout, known=known)
    return cfg, params


def _load_vocabulary(
    tensors: Tensors,
    cfg: DraftingConfig,
    target: dense.Target | None,
    dtype: Any,
    place: Place | None,
) -> Vocabulary:
    size = cfg.output_size
    ids = from_offsets(tensors.read("d2t", (size,)), cfg.vocab_size, str(tensors.path))
    if "t2d" in tensors:
        t2d = tensors.read("t2d", (cfg.vocab_size,))
        require(
            t2d.sum() == size and t2d[ids].all(),
            f"{tensors.path}: t2d names other tokens than d2t, expected the same",
        )
    if "lm_head.weight" not in tensors:
        require(
            target is not None,
            f"{tensors.path}: no lm_head.weight in it, expected a drafter that is not lean",
        )
        return Vocabulary(jnp.asarray(ids), columns(target, ids))
    spec_ = spec((cfg.hidden_size, size), ("embed", "vocab"))
    lm_head = load_parameters(tensors, spec_, layouts.draft_head_layout(), dtype, place)
    return Vocabulary(jnp.asarray(ids), lm_head)


def save_target(
    path: str | Path, config: TargetConfig, params: dense.Target, *, dtype: Any = None
) -> None:
    """Writes a target as a Hugging Face folder; `dtype` defaults to the parameters' own."""
    tensors = _cast(layouts.export(layouts.target_layout(config), params), dtype)
    _write_folder(Path(path), config_json.target_json(config), tensors)


def save_drafter(
    path: str | Path,
    config: DraftingConfig,
    params: AnyDrafter,
    *,
    target: tuple[TargetConfig, dense.Target],
    layout: Layout = "deepspec",
    target_name: str | None = None,
    dtype: Any = None,
    lean: bool = False,
) -> None:
    """Writes a drafter for other engines to read.

    Args:
      path: folder; files in it are replaced one by one, each whole or not at all.
      target: what `load_target` gave; its embedding and LM head are written too, unless `lean`.
      layout: of config.json; see `dialects`.
      target_name: folder or repository id of the target, from where vLLM may load it; the layout
        "speculators" has it.
      dtype: of the written tensors; default: the parameters' own.
      lean: leave out what is the target's: `load_drafter` takes it from there.
    """
    known = get_args(Layout)
    require(layout in known, f"layout={layout!r}: expected one of {', '.join(known)}")
    require(
        not lean or layout == "deepspec",
        f"layout={layout!r}: expected one that is not lean, other engines look for all tensors",
    )
    target_config, target_params = target
    config.check_fits(target_config)
    vocabulary, own = params.vocabulary, dataclasses.replace(params, vocabulary=None)
    tensors = layouts.export(layouts.drafter_layout(config), own)
    if not lean:
        tensors |= _ends(target_config, target_params)
    if vocabulary is not None:
        ids = np.asarray(vocabulary.ids, np.int64)
        if not lean:
            tensors |= layouts.export(layouts.draft_head_layout(), vocabulary.lm_head)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(config.vocab_size), ids)
    settings = dialects.from_deepspec(
        config_json.drafter_json(config, target_config),
        layout,
        target_architecture=model_config.TARGETS[target_config.model_type],
        target_name=target_name,
    )
    _write_folder(Path(path), settings, _cast(tensors, dtype))


def _ends(cfg: TargetConfig, target: dense.Target) -> dict[str, np.ndarray]:
    """The target's embedding and LM head, by the names that they have in a drafter."""
    whole = layouts.target_layout(cfg)
    ends = layouts.export((whole.embed, whole.lm_head), (target.embed, target.lm_head))
    embed = ends["model.embed_tokens.weight"]
    return {"embed_tokens.weight": embed, "lm_head.weight": ends.get("lm_head.weight", embed)}


def _cast(tensors: dict[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    """Numbers of the models as `dtype`; ids and flags stay what they are."""
    if dtype is None:
        return tensors
    return {n: t if n in ("d2t", "t2d") else t.astype(dtype) for n, t in tensors.items()}


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
