"""What decoding is of: the models, what is compiled in, and all rows between two rounds.

Letters: R rows, K drafts a round.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding

from dspark_jax import scheduler, sharding
from dspark_jax.config import DraftingConfig, TargetConfig, require
from dspark_jax.drafters.kinds import AnyDrafter, Memory, kind_of
from dspark_jax.kv_cache import KVCache
from dspark_jax.plans import Outlook, Plan, ladder, whole
from dspark_jax.sampling import Sampling
from dspark_jax.targets import dense
from dspark_jax.targets.dense import Target

STRETCH = 32
"""Positions of a backlog that the drafter takes in at a time; as many lie free behind the last."""


@struct.dataclass
class Models:
    """The target and its drafter (None for plain decoding)."""

    target: Target
    drafter: AnyDrafter | None
    target_config: TargetConfig = struct.field(pytree_node=False)
    drafter_config: DraftingConfig | None = struct.field(pytree_node=False)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    """The devices over which the models and the caches are split; None: one device."""

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter_config.target_layer_ids if self.drafter_config else ()

    @property
    def features_width(self) -> int:
        """Of what the drafter sees of a position; see `Hidden.seen`."""
        return max(len(self.taps), 1) * self.target.embed.shape[1]


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """What is compiled in: each value of it is its own executable."""

    policy: scheduler.Policy = "fixed"
    threshold: float | None = None
    """Least confidence of a draft that is verified, for the policy `threshold`."""
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    """All rows have temperature 0: no distribution is ever made."""
    truncate: bool = True
    """Some row may use top-k, top-p or min-p."""
    trace: bool = False
    """Log drafts and, with a confidence head, their confidences."""
    logprobs: bool = False
    """Log the log-probabilities of the tokens."""

    def check(self, models: Models) -> None:
        """Raises `InputError` when the models cannot be decoded like this."""
        drafter = models.drafter_config
        require(
            self.policy in get_args(scheduler.Policy),
            f"policy {self.policy!r}: expected one of {', '.join(get_args(scheduler.Policy))}",
        )
        require(
            self.policy == "none" or drafter is not None,
            f"policy {self.policy!r} needs a drafter; without one the policy is 'none'",
        )
        if self.policy in ("threshold", "causal", "delayed"):
            require(
                drafter is not None and drafter.confidence_head,
                f"policy {self.policy!r} needs a drafter with a confidence head",
            )
        if self.policy == "threshold":
            require(
                self.threshold is not None and 0 <= self.threshold <= 1,
                f"confidence threshold {self.threshold}: expected a number in 0..1",
            )


@struct.dataclass
class Backlog:
    """What the target saw and the drafter has not taken in, as there was nothing to draft."""

    features: jax.Array  # [R, S, F] by position, see `Hidden.seen`
    tokens: jax.Array | None  # [R, S] for drafters that read them
    taken: jax.Array  # [R] positions that the drafter's caches hold


@struct.dataclass
class DecodeState:
    """All rows between two rounds. The anchor is emitted, and in no cache yet."""

    anchor: jax.Array  # [R] last token of each row
    position: jax.Array  # [R] its position, and how many positions the caches hold
    remaining: jax.Array  # [R] tokens that may still be emitted
    active: jax.Array  # [R] bool
    sampling: Sampling
    key: jax.Array  # [R] typed key of each row
    target_cache: tuple[KVCache, ...]
    draft_cache: Memory
    scale: jax.Array | None = None  # [R, K] by which confidence logits are divided: STS
    outlook: Outlook | None = None  # for `delayed`
    backlog: Backlog | None = None  # None: the drafter takes in at once what the target saw


def create_state(
    models: Models,
    *,
    length: int,
    sampling: Sampling,
    key: jax.Array,
    limit: jax.Array,
    scale: jax.Array | None = None,
    outlook: Outlook | None = None,
    lazy: bool = False,
) -> DecodeState:
    """Empty rows, before `prefill`.

    Args:
      length: cache positions a row, at least `cache_length` of its prompt and limit.
      sampling: settings of the R rows.
      key: [R] typed keys; a row's draws depend on its own alone.
      limit: [R] most tokens to emit, at least 1.
      scale: [R, K] temperatures of the rows' confidences; default: 1.
      outlook: for the policy `delayed`.
      lazy: the drafter takes nothing in before it has to draft.
    """
    rows = limit.shape[0]
    target_cache, draft_cache = create_caches(models, rows, length)
    state = DecodeState(
        anchor=jnp.zeros(rows, jnp.int32),
        position=jnp.zeros(rows, jnp.int32),
        remaining=jnp.array(limit, jnp.int32),
        active=jnp.ones(rows, bool),
        sampling=jax.tree.map(jnp.array, sampling),  # the state is donated, the caller's stay
        key=jnp.array(key),
        target_cache=target_cache,
        draft_cache=draft_cache,
        scale=scale,
        outlook=outlook,
        backlog=create_backlog(models, rows, length) if lazy else None,
    )
    return pinned(models, state)


def create_caches(models: Models, rows: int, length: int) -> tuple[tuple[KVCache, ...], Memory]:
    """Empty caches of the target and of the drafter for rows of `length` positions."""
    dtype = models.target.embed.dtype
    target = dense.create_cache(models.target_config, rows, length, dtype)
    if models.drafter_config is None:
        return target, ()
    cfg = models.drafter_config
    return target, kind_of(cfg).create_cache(cfg, rows, length + STRETCH, dtype)


def create_backlog(models: Models, rows: int, length: int) -> Backlog:
    """Nothing seen yet by rows of `length` positions."""
    room, cfg = length + STRETCH, models.drafter_config
    features = jnp.zeros((rows, room, models.features_width), models.target.embed.dtype)
    tokens = None
    if cfg is not None and cfg.reads_tokens:
        tokens = jnp.zeros((rows, room), jnp.int32)
    return Backlog(features, tokens, jnp.zeros(rows, jnp.int32))


def pinned(models: Models, values: Any) -> Any:
    """Arrays between two programs in their places on the models' mesh, if they have one.

    Caches are split by rows and key/value heads, where these can be split, a backlog by rows; all
    else is whole on every device. A program finds its arrays where the one before has put them.
    """
    if models.mesh is None:
        return values
    return jax.lax.with_sharding_constraint(values, places(models.mesh, values))


def places(mesh: Mesh, values: Any) -> Any:
    """The shardings of `pinned`."""

    def split(x: jax.Array, *axes: str | None) -> NamedSharding:
        return NamedSharding(mesh, sharding.partition(x.shape, axes, mesh, sharding.DECODING))

    def place(x: KVCache | Backlog | jax.Array) -> Any:
        match x:
            case KVCache():
                return KVCache(*[split(x.k, "batch", "heads", None, None)] * 2)
            case Backlog():
                tokens = None if x.tokens is None else split(x.tokens, "batch", None)
                features = split(x.features, "batch", None, None)
                return Backlog(features, tokens, sharding.replicated(mesh))
            case _:
                return sharding.replicated(mesh)

    return jax.tree.map(place, values, is_leaf=lambda x: isinstance(x, KVCache | Backlog))


def cache_length(prompt: int, limit: int, block_size: int) -> int:
    """Positions that a row may write: its tokens, and a block behind the last anchor."""
    return prompt + limit + block_size


def block_size(models: Models, cfg: DecodeConfig) -> int:
    """K, drafts a round."""
    if cfg.policy == "none" or models.drafter_config is None:
        return 0
    return models.drafter_config.block_size


Carried = TypeVar("Carried")


def without_drafter(models: Models, carried: Carried) -> tuple[Models, Carried]:
    """For programs in which a lazy drafter does nothing but put off what it will want to know.

    Its parameters and caches are many arrays, and each that goes through a call costs some
    microseconds of it. `carried` is a state, or anything else with a `draft_cache`.
    """
    bare: Any = carried
    return dataclasses.replace(models, drafter=None), dataclasses.replace(bare, draft_cache=())


def set_aside(models: Models, state: DecodeState) -> tuple[Models, DecodeState]:
    """`without_drafter`, and without the outlook, which rounds without drafts leave as it is."""
    models, state = without_drafter(models, state)
    return models, dataclasses.replace(state, outlook=None)


def put_back(state: DecodeState, whole: DecodeState) -> DecodeState:
    """The state that goes on from one of `set_aside`, with what the whole one had beside it."""
    return dataclasses.replace(state, draft_cache=whole.draft_cache, outlook=whole.outlook)


def logs_confidences(models: Models, cfg: DecodeConfig) -> bool:
    """Whether rounds log confidences; a drafter without a head for them has none."""
    return cfg.trace and models.drafter_config is not None and models.drafter_config.confidence_head


def is_lazy(cfg: DecodeConfig) -> bool:
    """Whether the drafter takes nothing in before it has to draft."""
    return cfg.policy == "delayed"


def plans_of(models: Models, cfg: DecodeConfig, rows: int) -> tuple[Plan, ...]:
    """The rounds that a policy may run, ascending: each is an executable."""
    size = block_size(models, cfg)
    match cfg.policy:
        case "delayed":
            return ladder(rows, size)
        case "threshold" | "causal":
            return tuple(plan for plan in ladder(rows, size) if plan.drafts == size)
        case _:
            return (whole(rows, size),)
