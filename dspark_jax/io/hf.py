"""Hugging Face folders: targets in (also from GGUF files), drafters in and out."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dspark_jax.config import DrafterConfig, TargetConfig, require
from dspark_jax.drafters import dspark
from dspark_jax.io import files, layouts, model_config
from dspark_jax.io.tensors import Place, Tensors, load_parameters, open_tensors, report_extra
from dspark_jax.targets import dense

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
    cfg = model_config.load_target_config(folder)
    tensors, layout = open_tensors(folder), layouts.target_layout(cfg)
    specs, wanted = dense.specs(cfg), layout
    if not layers:
        specs, wanted = (dataclasses.replace(x, layers=()) for x in (specs, layout))
    params = load_parameters(tensors, specs, wanted, dtype, place)
    report_extra(tensors, layout, known=("lm_head.weight",))
    return cfg, params


def load_drafter(
    path: str | Path, *, dtype: Any = jnp.float32, place: Place | None = None
) -> tuple[DrafterConfig, dspark.Drafter]:
    """A drafter in the DeepSpec layout; its copies of the target's embedding and head are left.

    A checkpoint that promises a confidence head and lacks its weights is loaded without one, and a
    warning says so. Arguments and errors as for `load_target`.
    """
    folder = files.resolve(path)
    cfg, tensors = model_config.load_drafter_config(folder), Tensors(folder)
    if cfg.confidence_head and "confidence_head.proj.weight" not in tensors:
        log.warning("%s: no confidence weights in it: the confidence head is off", folder)
        cfg = dataclasses.replace(cfg, confidence_head=False)
    layout = layouts.drafter_layout(cfg)
    params = load_parameters(tensors, dspark.specs(cfg), layout, dtype, place)
    report_extra(tensors, layout, known=("embed_tokens.weight", "lm_head.weight"))
    return cfg, params


def save_target(
    path: str | Path, config: TargetConfig, params: dense.Target, *, dtype: Any = None
) -> None:
    """Writes a target as a Hugging Face folder; `dtype` defaults to the parameters' own."""
    tensors = _cast(layouts.export(layouts.target_layout(config), params), dtype)
    _write_folder(Path(path), model_config.target_json(config), tensors)


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
    whole = layouts.target_layout(target_config)
    shared = layouts.export(
        (whole.embed, whole.lm_head), (target_params.embed, target_params.lm_head)
    )
    embed = shared["model.embed_tokens.weight"]
    tensors = layouts.export(layouts.drafter_layout(config), params)
    tensors |= {"embed_tokens.weight": embed, "lm_head.weight": shared.get("lm_head.weight", embed)}
    _write_folder(
        Path(path), model_config.drafter_json(config, target_config), _cast(tensors, dtype)
    )


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
