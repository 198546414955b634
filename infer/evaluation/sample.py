"""What was decoded: drafters, and what came out of sets of prompts with them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dspark_jax.config import TransformerConfig
from dspark_jax.request import Completion
from infer.evaluation import counts
from infer.evaluation.datasets import Dataset
from infer.evaluation.estimates import quotient, resample, weights


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter that is measured."""

    name: str
    """Short, and different from the others'."""
    path: str
    config: TransformerConfig
    block_size: int
    """Largest that is measured."""
    confidence_head: bool
    temperatures: tuple[float, ...] | None = None
    """Of its calibration, by position."""

    @property
    def title(self) -> str:
        return f"{self.name}, {self.block_size} draft{'s' * (self.block_size > 1)}"


@dataclasses.dataclass(frozen=True)
class Sample:
    """A set of prompts, decoded with a drafter, with a trace."""

    drafter: Drafter
    block_size: int
    threshold: float | None
    """Least confidence of a draft that was verified; None: all drafts were."""
    dataset: Dataset
    completions: Sequence[Completion]
    seed: int

    @property
    def often(self) -> np.ndarray:
        return weights(len(self.completions), self.seed, self.dataset.name)

    @functools.cached_property
    def accepted_length(self) -> np.ndarray:
        """[B] tokens that a round adds, over rounds that were not cut."""
        tokens, rounds = resample(counts.lengths(self.completions), self.often).T
        return quotient(tokens, rounds)

    @property
    def rounds(self) -> int:
        """Those that were not cut."""
        return int(counts.lengths(self.completions)[:, 1].sum())


def names_of(paths: Sequence[str]) -> list[str]:
    """The parts of paths that tell them apart: a and b of runs/a/drafter and runs/b/drafter."""
    parts = [path.rstrip("/").split("/") for path in paths]
    if len(parts) == 1:
        return [parts[0][-1]]
    start = _shared(parts)
    end = _shared([p[start:][::-1] for p in parts])
    return ["/".join(p[start : len(p) - end]) for p in parts]


def _shared(parts: Sequence[Sequence[str]]) -> int:
    """Elements at the start that are the same in all, of which each keeps one."""
    least = min(map(len, parts)) - 1
    same = (len(set(each)) == 1 for each in zip(*parts, strict=False))
    return min(least, sum(itertools.takewhile(bool, same)))


def largest(samples: Iterable[Sample]) -> list[Sample]:
    """Those of each drafter's largest block size."""
    return [s for s in samples if s.block_size == s.drafter.block_size]


def by(samples: Iterable[Any], key: Any) -> list[tuple[Any, list[Any]]]:
    """Samples, or figures, by a key, in the order in which the keys come up."""
    found: dict[Any, list[Any]] = {}
    for each in samples:
        found.setdefault(key(each), []).append(each)
    return list(found.items())
