"""Several documents in one row of tokens: where each begins, and places within it.

Segment ids [B, S] int32 are the same for all tokens of a document, and those of a document lie side
by side. Padding is a document too: nothing of it is learnt, and nobody else sees it.

Letters: B batch, S sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def document_starts(segments: jax.Array) -> jax.Array:
    """Where in the row the document of each token begins: [B, S] -> [B, S] int32."""
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    places = jnp.arange(segments.shape[1], dtype=jnp.int32)
    begins = (segments != before) & (places > 0)
    return jax.lax.cummax(jnp.where(begins, places, 0), axis=1)


def document_positions(length: int, segments: jax.Array | None) -> jax.Array:
    """Places of tokens in their documents, [B, S], or [1, S] where a row is one document."""
    places = jnp.arange(length)[None]
    return places if segments is None else places - document_starts(segments)
