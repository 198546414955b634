"""Writes the drafter of a checkpoint as a folder that other engines read.

python -m train.export --workdir RUN --output DIR [--step N]
                       [--layout deepspec|speculators|sglang] [--lean] [--dtype DTYPE]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from safetensors import SafetensorError

from dspark_jax import params as parameters
from dspark_jax.config import require
from dspark_jax.drafters.kinds import kind_of
from dspark_jax.io import cli, files, hf
from dspark_jax.io.dialects import Layout
from dspark_jax.vocabulary import with_vocabulary
from train import draft_tokens
from train.checkpoint import damage, load, newest_whole, steps
from train.settings import EMBEDDED
from train.target import target_folder
from train.workdir import CHECKPOINTS, read_workdir


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """What to export."""

    workdir: Path
    """Folder of the run."""
    output: Path
    """Folder for the drafter, new or empty."""
    step: int | None = None
    """Step of the checkpoint; default: the newest whole one."""
    layout: Layout = "deepspec"
    """deepspec is that of the released checkpoints, speculators that of vLLM's library; sglang is
    deepspec with what SGLang looks for."""
    lean: bool = False
    """Leave out embedding and LM head, which are the target's: for dspark_jax alone."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the file; default: that in which the run computes."""


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(ExportSettings, args, prog="train.export", description=__doc__ or "")
    try:
        export(settings)
    except SafetensorError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def export(settings: ExportSettings) -> None:
    """Writes the folder. Raises `InputError` before anything is written."""
    output = settings.output
    require(
        not output.exists() or (output.is_dir() and not any(output.iterdir())),
        f"{output}: expected a new or empty folder",
    )
    files.require_room(output)
    run = read_workdir(settings.workdir)
    folder = settings.workdir / CHECKPOINTS
    step = _whole_step(folder, settings.step)
    target_config, target = hf.load_target(target_folder(run), dtype=jnp.dtype(run.compute.dtype))
    cfg = run.drafter_config(target_config)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
        parameters.abstract(kind_of(cfg).specs(cfg)),
    )
    found, _ = load(folder, step, {"params": abstract})
    ids = draft_tokens.read(settings.workdir, cfg)
    require(
        ids is not None or cfg.draft_vocab_size is None,
        f"{settings.workdir / draft_tokens.FILE}: no such file, expected that of the run",
    )
    params = with_vocabulary(found["params"], target, ids)
    hf.save_drafter(
        output, cfg, params, target=(target_config, target),
        layout=settings.layout, target_name=None if run.target == EMBEDDED else run.target,
        dtype=jnp.dtype(settings.dtype or run.compute.dtype), lean=settings.lean,
    )  # fmt: skip
    print(f"drafter of {step} steps: {output}")


def _whole_step(folder: Path, wanted: int | None) -> int:
    there = steps(folder)
    require(len(there) > 0, f"{folder}: no checkpoints in it")
    if wanted is None:
        newest, wrong = newest_whole(folder)
        assert newest is not None
        for step, reason in wrong.items():
            if step > newest:
                print(f"step {step} is damaged ({reason}); step {newest} is taken", file=sys.stderr)
        return newest
    require(
        wanted in there,
        f"{folder}: no checkpoint of step {wanted}; expected one of {', '.join(map(str, there))}",
    )
    reason = damage(folder / str(wanted), thorough=True)
    require(reason is None, f"{folder / str(wanted)}: the checkpoint is damaged ({reason})")
    return wanted


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
