"""Opens the drafters of an evaluation, and decodes sets of prompts with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from dspark_jax import batch_shape, generation
from dspark_jax.batching import NO_FACTS, Facts
from dspark_jax.config import InputError, require
from dspark_jax.generation import Pair
from dspark_jax.io import calibration_file, files, model_config
from dspark_jax.request import Request
from infer import facts
from infer.engine import Engine
from infer.evaluation.datasets import Dataset
from infer.evaluation.sample import Drafter, Sample, names_of

NO_CALIBRATION = "none"
Asked = Mapping[str, Sequence[Request]]
"""Requests by name of their set of prompts."""


def open_drafters(
    target: Path,
    drafts: Sequence[str],
    block_sizes: Sequence[int],
    calibrations: Sequence[str],
    temperature: float,
) -> dict[Drafter, list[int]]:
    """The drafters with the block sizes that each is measured at, before any weights are read.

    Args:
      block_sizes: to measure, as far as a drafter was trained for them; none: its own.
      calibrations: files of `infer.calibrate`, or `NO_CALIBRATION`, of each drafter; or none.
      temperature: of the rows, by which a calibration's entry is chosen.
    Raises:
      InputError: a drafter does not go with the target, with every block size or with its
        calibration; or a block size goes with no drafter.
    """
    target_config = model_config.load_target_config(target)
    found: dict[Drafter, list[int]] = {}
    longest = 0
    for n, (name, path) in enumerate(zip(names_of(drafts), drafts, strict=True)):
        folder = files.resolve(path)
        cfg = model_config.load_drafter_config(folder)
        cfg.check_fits(target_config)
        longest = max(longest, cfg.block_size)
        sizes = [k for k in block_sizes or [cfg.block_size] if 1 <= k <= cfg.block_size]
        given = ", ".join(map(str, block_sizes))
        require(
            len(sizes) > 0,
            f"--block-sizes {given}: expected one in 1..{cfg.block_size}, which {path} was trained"
            " for",
        )
        temperatures = None
        if calibrations and calibrations[n] != NO_CALIBRATION:
            if not cfg.confidence_head:
                raise InputError(f"--calibration {calibrations[n]}: {path} has no confidence head")
            known = calibration_file.load(Path(calibrations[n]))
            known.check_fits(target, folder, max(sizes))
            temperatures = tuple(facts.temperatures(known, temperature, max(sizes)))
        drafter = Drafter(name, path, cfg, max(sizes), cfg.confidence_head, temperatures)
        found[drafter] = sorted(sizes)
    unused = set(block_sizes) - {k for sizes in found.values() for k in sizes}
    require(
        not unused,
        f"--block-sizes {min(unused, default=0)}: expected numbers in 1..{longest}, which a drafter"
        " was trained for",
    )
    return found


def decode(
    pair: Pair,
    drafter: Drafter,
    sets: Sequence[Dataset],
    asked: Asked,
    *,
    slots: int,
    size: int,
    threshold: float | None = None,
) -> Iterator[Sample]:
    """Decodes every set of prompts, in one shape for all requests, and yields each when done.

    Args:
      size: drafts a round.
      threshold: least confidence of a draft that is verified; None verifies all.
    """
    pair = generation.with_block_size(pair, size)
    everything = [request for each in sets for request in asked[each.name]]
    cfg = generation.decode_config(
        pair.models,
        everything,
        policy="fixed" if threshold is None else "threshold",
        threshold=threshold,
        trace=True,
    )
    shape = batch_shape.plan(pair.models, everything, min(slots, len(everything)))
    known = NO_FACTS
    temperatures = drafter.temperatures
    if temperatures is not None and size == drafter.block_size:
        known = Facts(scale=lambda request: temperatures)
    engine = Engine(pair, shape, cfg, known)
    for each in sets:
        own = asked[each.name]
        with tqdm(total=len(own), unit="prompt", desc=each.name, disable=None) as bar:
            run = engine.decode(own, lambda done, bar=bar: bar.update(len(done)) and False)
        yield Sample(drafter, size, threshold, each, run.completions, own[0].seed)
