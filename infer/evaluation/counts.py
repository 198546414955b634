"""Sums by prompt of what its rounds did, from which all figures are made.

Letters: N prompts, K drafts a round, T thresholds, J bins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark_jax.calibration import ECE_BINS, bin_of, survival
from dspark_jax.request import Completion
from infer.summary import tried_and_passed


def lengths(completions: Sequence[Completion]) -> np.ndarray:
    """[N, 2]: tokens that the rounds added which no stop token or limit cut, and those rounds."""
    rounds = [c.full_rounds for c in completions]
    return np.array([(sum(each), len(each)) for each in rounds]).reshape(-1, 2)


def positions(completions: Sequence[Completion], size: int) -> np.ndarray:
    """[N, 2, K]: drafts accepted, of those judged: verified behind accepted ones alone."""
    found = [tried_and_passed([c], size) for c in completions]
    return np.array([(passed, tried) for tried, passed in found]).reshape(-1, 2, size)


def verified(completions: Sequence[Completion], size: int) -> np.ndarray:
    """[N, 3]: drafts accepted, verified and made, of all rounds."""
    return np.array(
        [
            (sum(c.accepted_drafts), sum(c.verified_lengths), size * len(c.verified_lengths))
            for c in completions
        ]
    ).reshape(-1, 3)


def by_threshold(completions: Sequence[Completion], thresholds: np.ndarray) -> np.ndarray:
    """[N, 3, T]: what `verified` counts, had each of these blocks been cut at a threshold.

    The completions are those of runs in which all drafts were verified. What a threshold would have
    verified of a block is known then, and so is how many of these would have been accepted. A run
    with the threshold has other blocks, as it moves on by fewer tokens where it cuts one short.
    """
    found = np.zeros((len(completions), 3, len(thresholds)))
    for place, c in zip(found, completions, strict=True):
        for block, accepted in zip(c.confidences or (), c.accepted_drafts, strict=True):
            least = np.minimum.accumulate(block)
            sent = (least[:, None] >= thresholds).sum(axis=0)
            place += np.stack([np.minimum(sent, accepted), sent, np.full_like(sent, len(block))])
    return found


def reliability(
    completions: Sequence[Completion], size: int, temperatures: np.ndarray | None
) -> np.ndarray:
    """[N, 3, K, J]: prefixes accepted, their predicted chances, and how many prefixes, by bins.

    All drafts were verified. The bins of the predicted chance are `ECE_BINS` of equal width.

    Args:
      temperatures: [K] by which the logits of the confidences are divided; None: raw.
    """
    found = np.zeros((len(completions), 3, size, ECE_BINS))
    for place, c in zip(found, completions, strict=True):
        chances = survival(np.reshape(c.confidence_logits or (), (-1, size)), temperatures)
        accepted = np.array(c.accepted_drafts, int)[:, None] > np.arange(size)
        which = bin_of(chances, ECE_BINS)
        where = (np.broadcast_to(np.arange(size), which.shape), which)
        for total, term in zip(place, (accepted, chances, np.ones_like(chances)), strict=True):
            np.add.at(total, where, term)
    return found
