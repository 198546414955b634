"""A drafter that proposes the most frequent tokens alone: a smaller LM head to read a draft.

A token outside has draft probability 0. It is not lost: the target accepts and corrects over its
whole vocabulary, so that the output has the target's distribution as ever. The LM head's columns
are those of the target's. (EAGLE-3, arXiv 2503.01840; FR-Spec, arXiv 2502.14856.)

Letters: V vocabulary of the target, Vd that of the drafter, D width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.config import require
from dspark_jax.sampling import Draft
from dspark_jax.targets.dense import Target


@struct.dataclass
class Vocabulary:
    """What a drafter may propose."""

    ids: jax.Array  # [Vd] int32 of the target's vocabulary
    lm_head: jax.Array  # [D, Vd]


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """Ids [size] of the largest of `counts` [V], ascending; of equal ones the smallest ids."""
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def from_offsets(d2t: np.ndarray, vocab_size: int, where: str) -> np.ndarray:
    """Ids [Vd] of a checkpoint's `d2t`: draft id i is the token i + d2t[i].

    Raises:
      InputError: no whole numbers, ids outside of the target's vocabulary, or one twice; `where`
        says of which file.
    """
    require(
        bool(np.all(d2t == np.round(d2t))), f"{where}: d2t has fractions, expected whole numbers"
    )
    ids = np.arange(len(d2t)) + d2t
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    require(
        len(outside) == 0,
        f"{where}: d2t gives draft id {outside[:1].sum()} the token {ids[outside[:1]].sum()},"
        f" expected one in 0..{vocab_size - 1}",
    )
    found, times = np.unique(ids, return_counts=True)
    twice = found[times > 1]
    require(
        len(twice) == 0,
        f"{where}: d2t gives token {twice[:1].sum()} to several draft ids, expected one for each",
    )
    return ids.astype(np.int32)


def columns(target: Target, ids: jax.Array | np.ndarray) -> jax.Array:
    """The target's LM head [D, Vd] of these tokens."""
    return target.embed[ids].T if target.lm_head is None else target.lm_head[:, ids]


def pruned(target: Target, ids: jax.Array | np.ndarray | None) -> Target:
    """The target with the LM head that a drafter of these tokens has; None: all of it."""
    return target if ids is None else dataclasses.replace(target, lm_head=columns(target, ids))


def with_vocabulary(drafter: Any, target: Target, ids: np.ndarray | None) -> Any:
    """A trained drafter with its tokens and their LM head; None: it proposes any."""
    if ids is None:
        return drafter
    vocabulary = Vocabulary(jnp.asarray(ids, jnp.int32), columns(target, np.asarray(ids)))
    return dataclasses.replace(drafter, vocabulary=vocabulary)


def reader(vocabulary: Vocabulary | None, target: Target) -> Target:
    """The target as a drafter reads its drafts: with the drafter's LM head."""
    if vocabulary is None:
        return target
    return dataclasses.replace(target, lm_head=vocabulary.lm_head)


def token_ids(vocabulary: Vocabulary | None, tokens: jax.Array) -> jax.Array:
    """The target's ids of tokens in the drafter's."""
    return tokens if vocabulary is None else vocabulary.ids[tokens]


def widened(draft: Draft, vocabulary: Vocabulary | None, size: int) -> Draft:
    """A draft with its distributions [R, K, Vd] over the whole vocabulary, of `size` tokens."""
    if vocabulary is None or draft.probs is None:
        return draft
    probs = jnp.zeros((*draft.probs.shape[:2], size), draft.probs.dtype)
    probs = probs.at[..., vocabulary.ids].set(draft.probs, unique_indices=True)
    return dataclasses.replace(draft, probs=probs)
