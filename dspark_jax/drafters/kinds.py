"""The kinds of drafters, and what rounds, prefill and training ask of each.

A kind is a module of functions; the type of a drafter's configuration says which.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from dspark_jax.config import DrafterConfig, DraftingConfig, Eagle3Config, MtpConfig
from dspark_jax.drafters import dspark, recurrent
from dspark_jax.flat import FlatTokens
from dspark_jax.kv_cache import KVCache
from dspark_jax.layers import RopeAngles
from dspark_jax.sampling import Draft, Sampling
from dspark_jax.targets.dense import Target

AnyDrafter = dspark.Drafter | recurrent.Recurrent
Memory = tuple[KVCache, ...] | recurrent.Memory
"""What a drafter remembers of its rows: a pytree whose arrays begin with R."""


class Kind(Protocol):
    """The functions of a kind; the modules say what each does."""

    # Parameters, memory and context are each kind's own.

    def specs(self, cfg: Any) -> Any: ...

    def start_from_target(self, params: Any, target: Target, cfg: Any) -> Any: ...

    def create_cache(self, cfg: Any, rows: int, length: int, dtype: Any) -> Any: ...

    def context_weights(self, params: Any) -> jax.Array: ...

    def append_context(
        self,
        params: Any,
        target: Target,
        weights: jax.Array,
        features: jax.Array,
        flat: FlatTokens,
        position: jax.Array,
        memory: Any,
        table: RopeAngles,
        /,
        *,
        cfg: Any,
    ) -> Any: ...

    def draft(
        self,
        params: Any,
        target: Target,
        anchor: jax.Array,
        position: jax.Array,
        memory: Any,
        table: RopeAngles,
        sampling: Sampling | None,
        noise: jax.Array | None,
        /,
        *,
        cfg: Any,
        truncate: bool,
        mesh: Mesh | None,
    ) -> tuple[Draft, Any]: ...

    def training_context(
        self,
        params: Any,
        target: Target,
        features: jax.Array,
        tokens: jax.Array,
        angles: RopeAngles,
        *,
        cfg: Any,
    ) -> Any: ...

    def training_logits(
        self,
        params: Any,
        target: Target,
        previous: jax.Array,
        position: jax.Array,
        context: Any,
        first: jax.Array | None = None,
        *,
        cfg: Any,
    ) -> tuple[jax.Array, jax.Array | None]: ...


KINDS: dict[type[DraftingConfig], Kind] = {
    DrafterConfig: dspark,
    Eagle3Config: recurrent,
    MtpConfig: recurrent,
}


def kind_of(cfg: DraftingConfig) -> Kind:
    """The functions of the drafters of this configuration."""
    return KINDS[type(cfg)]
