"""What is known of a pair on this machine before it decodes: memory, costs, calibration."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from dspark_jax import batch_shape, costs
from dspark_jax.batch_shape import BatchShape
from dspark_jax.batching import Facts
from dspark_jax.config import InputError, require
from dspark_jax.costs import CostTable
from dspark_jax.generation import Pair
from dspark_jax.io import calibration_file, cost_file, files
from dspark_jax.io.calibration_file import Calibration
from dspark_jax.plans import Plan
from dspark_jax.request import Request
from dspark_jax.state import DecodeConfig, Models, block_size, is_lazy, plans_of
from infer.models import devices_of
from infer.settings import COSTED, Settings

MEMORY_FILE = Path("/proc/meminfo")
"""Where Linux says what is free."""


def gather(settings: Settings, pair: Pair, shape: BatchShape, cfg: DecodeConfig) -> Facts:
    """Reads or measures what the policy needs; the rows must fit into memory."""
    table = scale = None
    if settings.cost_table is not None:
        table = read_costs(settings, settings.cost_table, shape, cfg, pair.models)
    if settings.calibration is not None:
        scale = read_scale(settings.calibration, *settings.folders, pair.models)
    require_memory(pair.models, shape, lazy=is_lazy(cfg))
    if table is None and cfg.policy in COSTED:
        print("measuring the cost of a round; infer.profile does that once", file=sys.stderr)
        choices = plans_of(pair.models, cfg, shape.rows)
        table = measure_costs(pair.models, shape, cfg, choices, progress)
    if cfg.policy in COSTED:
        kinds = len(plans_of(pair.models, cfg, shape.rows))
        print(f"compiling {kinds} kinds of rounds", file=sys.stderr)
    return Facts(table, scale)


def measure_costs(
    models: Models,
    shape: BatchShape,
    cfg: DecodeConfig,
    choices: Sequence[Plan],
    progress: Callable[[Sequence[Plan]], Iterable[Plan]] = iter,
) -> CostTable:
    """Costs of rounds with rows that are half full, or less to have room for a block."""
    block = models.drafter_config.block_size if models.drafter_config else 0
    return costs.measure(
        models,
        cfg,
        choices,
        rows=shape.rows,
        length=shape.length,
        context=min(shape.length // 2, shape.length - 1 - block),
        progress=progress,
    )


def progress(items: Sequence[Plan]) -> Iterable[Plan]:
    """The kinds of rounds, one after the other, on a progress bar."""
    return tqdm(items, unit="kind of round", disable=None)


def require_memory(
    models: Models,
    shape: BatchShape,
    shorter: str = "--max-new-tokens",
    *,
    lazy: bool,
    batches: int = 1,
) -> None:
    """Says what a slot takes.

    Args:
      shorter: the option that makes the rows shorter.
      lazy: as `state.is_lazy` says.
      batches: of so many slots, at one time.
    Raises:
      InputError: all of them do not fit into the memory that is free.
    """
    each = batch_shape.bytes_per_row(models, shape, lazy=lazy)
    needed = batches * each * (shape.rows + 1)  # a newcomer is read beside the rows
    slots = f"{'' if batches == 1 else f'{batches} times '}{shape.rows} slots"
    print(f"{slots} of {shape.length} positions, {megabytes(each)} each", file=sys.stderr)
    free = free_bytes()
    require(
        free is None or needed <= free,
        f"{slots} of {shape.length} positions take {megabytes(needed)}, and"
        f" {megabytes(free or 0)} are free: expected fewer slots or a smaller {shorter}",
    )


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"


def free_bytes() -> int | None:
    """Of the first device; of the whole machine where that is a CPU; None if nobody knows."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    try:
        lines = MEMORY_FILE.read_text().splitlines()
    except OSError:
        return None
    # Not MemFree: what caches files is given back when it is wanted.
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None


def read_costs(
    settings: Settings, path: Path, shape: BatchShape, cfg: DecodeConfig, models: Models
) -> CostTable:
    """The table in a file, if it is of this setting and has every round that the policy runs."""
    target, draft = settings.folders
    found = cost_file.load(path)
    found.check_fits(
        path,
        target=files.fingerprint(target),
        draft=files.fingerprint(draft) if draft else "",
        block_size=block_size(models, cfg),
        slots=shape.rows,
        device=devices_of(models),
        dtype=settings.dtype,
        greedy=cfg.greedy,
    )
    try:
        found.table.rates(plans_of(models, cfg, shape.rows))
    except InputError as error:
        raise InputError(f"{path}: {error}: profile again") from error
    return found.table


def read_scale(
    path: Path, target: Path, draft: Path | None, models: Models
) -> Callable[[Request], Sequence[float]]:
    """Temperatures of a request's confidences, from the calibration in a file."""
    if draft is None or models.drafter_config is None:
        raise InputError("--calibration: expected with a drafter only")
    size = models.drafter_config.block_size
    found = calibration_file.load(path)
    found.check_fits(target, draft, size)
    return lambda request: temperatures(found, request.temperature, size)


def temperatures(calibration: Calibration, temperature: float, size: int) -> Sequence[float]:
    """Those of the nearest entry; 1 where there is none, which is said once."""
    entry = calibration.entry(temperature)
    if entry is None:
        kind = "sampled" if temperature > 0 else "greedy"
        warnings.warn(
            f"the calibration has no entry for {kind} rows: raw confidences", stacklevel=2
        )
        return [1.0] * size
    return entry.temperatures
