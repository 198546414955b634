"""Calibration on disk: temperatures of the confidences, and what they were fitted for.

Labels differ with the sampling temperature, so there is an entry for each; it holds for the target,
the drafter and the block size that it was fitted with, and for no others.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from dspark_jax.config import InputError, require
from dspark_jax.io import files


@dataclasses.dataclass(frozen=True)
class Entry:
    """Temperatures T_1..T_K of the confidence logits at one setting of the sampling."""

    temperature: float
    """Of the tokens; 0 is greedy."""
    top_k: int
    top_p: float
    min_p: float
    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    """Expected calibration error of the survival by position, on rounds that were not fitted."""
    ece_after: tuple[float, ...]
    rounds: int
    """Rounds that were fitted."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """All entries of one pair."""

    target: str
    """Fingerprint of the target; see `files.fingerprint`."""
    draft: str
    block_size: int
    entries: tuple[Entry, ...]

    def check_fits(self, target: Path, draft: Path, block_size: int) -> None:
        """Raises `InputError` when it was fitted for another pair or block size."""
        for name, folder, print_ in (
            ("target", target, self.target),
            ("drafter", draft, self.draft),
        ):
            require(
                files.fingerprint(folder) == print_,
                f"{folder}: the calibration was fitted for another {name}: calibrate again",
            )
        require(
            block_size == self.block_size,
            f"the calibration was fitted for blocks of {self.block_size}, not {block_size}:"
            " calibrate again",
        )

    def entry(self, temperature: float) -> Entry | None:
        """That of the nearest temperature: for sampled rows above 0, for greedy ones at 0."""
        fitting = [e for e in self.entries if (e.temperature > 0) == (temperature > 0)]
        return min(fitting, key=lambda e: abs(e.temperature - temperature), default=None)

    def save(self, path: Path) -> None:
        """Writes JSON, whole or not at all."""
        files.write_whole(path, json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def load(path: Path) -> Calibration:
    """Reads what `Calibration.save` wrote; anything else is an `InputError`."""
    values = files.read_json(path)
    try:
        size = files.typed(values["block_size"], int)
        return Calibration(
            target=files.typed(values["target"], str),
            draft=files.typed(values["draft"], str),
            block_size=size,
            entries=tuple(_entry(e, size) for e in values["entries"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: not a calibration ({files.fault(error)})") from error


def _entry(values: dict[str, Any], size: int) -> Entry:
    numbers = {
        name: tuple(files.typed(x, float) for x in values[name])
        for name in ("temperatures", "ece_before", "ece_after")
    }
    right = all(len(x) == size for x in numbers.values())
    if not (right and all(0 < t < math.inf for t in numbers["temperatures"])):
        raise ValueError(f"expected {size} numbers above 0")
    temperature = files.typed(values["temperature"], float)
    if not 0 <= temperature < math.inf:
        raise ValueError("expected a temperature of 0 or more")
    return Entry(
        temperature=temperature,
        top_k=files.typed(values["top_k"], int),
        top_p=files.typed(values["top_p"], float),
        min_p=files.typed(values["min_p"], float),
        rounds=files.typed(values["rounds"], int),
        **numbers,
    )
