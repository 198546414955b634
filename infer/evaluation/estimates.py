"""Figures with 95 % intervals, by drawing prompts again (the bootstrap).

Rounds of one prompt are alike, so that prompts are drawn, with replacement, and not rounds. A
figure is any function of sums over prompts; it is computed from the sums as they are and from those
of every resample, side by side: the first of B values is the figure, the rest are its replicates.
Two drafters on the same prompts get the same resamples, so that their quotient is paired.

Letters: N prompts, B = 1 + RESAMPLES.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib

import numpy as np

RESAMPLES = 4000
PART = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Figures and the ends of their 95 % intervals: arrays of one shape, or single numbers.

    NaN where there was nothing to judge.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @staticmethod
    def of(values: np.ndarray) -> Estimate:
        """From the figures and their replicates [B, ...]; replicates that are NaN are left out."""
        value, replicates = values[0], values[1:]
        judged = ~np.isnan(value)
        # A column of NaN alone has no quantiles, which NumPy would warn of.
        replicates = np.where(judged & ~np.isnan(replicates), replicates, np.nan)
        filled = np.where(np.isnan(replicates).all(axis=0), 0, replicates)
        ends = np.nanquantile(filled, [(1 - PART) / 2, (1 + PART) / 2], axis=0)
        low, high = np.where(judged, ends, np.nan)
        return Estimate(value, low, high)

    def __getitem__(self, place: int) -> Estimate:
        return Estimate(self.value[place], self.low[place], self.high[place])


@functools.lru_cache(maxsize=16)
def weights(prompts: int, seed: int, name: str) -> np.ndarray:
    """How often [B, N] each prompt is in the sample, which is once, and in each resample.

    Args:
      name: of the set of prompts: different sets are drawn from independently.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    often = rng.multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLES)
    return np.concatenate([np.ones((1, prompts)), often])


def resample(sums: np.ndarray, often: np.ndarray) -> np.ndarray:
    """Totals [B, ...] of sums by prompt [N, ...]."""
    return np.tensordot(often, np.asarray(sums, float), axes=1)


def quotient(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """above / below, NaN where below is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below == 0, np.nan, above / below)
