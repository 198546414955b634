"""Frozen configurations of targets and drafters.

Everything that can be wrong with a configuration is said here, in one line, before anything is
compiled.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, Self

HEADS = ("none", "vanilla", "gated", "rnn")
HeadKind = Literal["none", "vanilla", "gated", "rnn"]
ModelType = Literal["qwen3", "llama", "gemma4"]

MOST_LAYERS = 1024
"""More is a slip; to describe a number of layers with many zeros, one by one, takes for ever."""


class InputError(ValueError):
    """Something a user gave is wrong: one line that says what, where and what was expected."""


def require(condition: bool, message: str) -> None:
    """Raises `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: plain, with the frequency scaling of Llama 3, or of a part.

    With `proportional` (Gemma4) the first `rotated_part` of the pairs turn, as fast as they do in a
    plain embedding of all of them, divided by `factor`; the others stay as they are.
    """

    theta: float = 10_000.0
    scaling: Literal["default", "llama3", "proportional"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    rotated_part: float = 1.0

    def frequencies(self, head_dim: int) -> list[float]:
        """Radians per position of each of the `head_dim / 2` pairs."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        match self.scaling:
            case "default":
                return plain
            case "llama3":
                return [self._llama3(f) for f in plain]
            case "proportional":
                turning = int(self.rotated_part * head_dim // 2)
                still = [0.0] * (len(plain) - turning)
                return [f / self.factor for f in plain[:turning]] + still

    def _llama3(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        turns = self.original_max_position / wavelength
        if turns < self.low_freq_factor:
            return frequency / self.factor
        if turns > self.high_freq_factor:
            return frequency
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes that a target and its drafter have in common, and the kind of their layers.

    A Qwen3 layer has norms of queries and keys, which a Llama layer lacks. A Gemma4 layer besides
    norms its values, without a weight, and what attention and MLP add to the residual stream; its
    scores are not scaled, its MLP is gated by GELU, and it ends in a product with a scalar.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope = Rope()
    norm_eps: float = 1e-6
    model_type: ModelType = "qwen3"
    key_is_value: bool = False
    """Values are the keys before their norm and RoPE: there is no matrix for them (Gemma4)."""

    def __post_init__(self):
        for field in dataclasses.fields(TransformerConfig):
            value = getattr(self, field.name)
            if field.type == "int":
                require(
                    isinstance(value, int) and value > 0,
                    f"{field.name}={value!r}: expected a whole number above 0",
                )
        require(
            self.num_layers <= MOST_LAYERS,
            f"num_layers={self.num_layers}: expected at most {MOST_LAYERS}",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads}: expected a multiple of num_kv_heads={self.num_kv_heads}",
        )
        require(self.head_dim % 2 == 0, f"head_dim={self.head_dim}: expected an even number")

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qk_norm(self) -> bool:
        return self.model_type != "llama"

    @property
    def gemma(self) -> bool:
        return self.model_type == "gemma4"

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied with."""
        return 1.0 if self.gemma else self.head_dim**-0.5


@dataclasses.dataclass(frozen=True)
class SlidingLayers:
    """Those layers of a target that see a window only, and their own sizes (Gemma4)."""

    layers: tuple[int, ...]
    window: int
    """Positions that a query sees, itself among them."""
    num_kv_heads: int
    head_dim: int
    rope: Rope


@dataclasses.dataclass(frozen=True)
class TargetConfig(TransformerConfig):
    """A dense decoder: Qwen3, Llama or Gemma4, with tied or untied embeddings.

    Where some layers are sliding, the sizes that all configurations have are those of the others.
    """

    tie_embeddings: bool = False
    max_position: int = 4096
    stop_token_ids: tuple[int, ...] = ()
    sliding: SlidingLayers | None = None
    logit_softcap: float | None = None
    """c of c tanh(logits / c)."""

    def __post_init__(self):
        super().__post_init__()
        require(
            self.logit_softcap is None or self.logit_softcap > 0,
            f"logit_softcap={self.logit_softcap}: expected a number above 0",
        )
        if self.sliding is not None:
            layers, window = self.sliding.layers, self.sliding.window
            require(
                all(0 <= i < self.num_layers for i in layers),
                f"sliding layers {list(layers)}: expected layers in 0..{self.num_layers - 1}",
            )
            require(window > 0, f"sliding window {window}: expected a number above 0")
            require(
                self.key_is_value or self.sliding.num_kv_heads == self.num_kv_heads,
                f"num_kv_heads={self.sliding.num_kv_heads} of sliding layers: expected"
                f" {self.num_kv_heads}, as of the others, where keys are not values",
            )
            self.layer(layers[0] if layers else 0)  # its sizes are checked as those of the others

    def layer(self, index: int) -> TargetConfig:
        """The configuration with the sizes of one layer, and none but those."""
        if self.sliding is None or index not in self.sliding.layers:
            return dataclasses.replace(self, sliding=None)
        return dataclasses.replace(
            self,
            num_kv_heads=self.sliding.num_kv_heads,
            head_dim=self.sliding.head_dim,
            rope=self.sliding.rope,
            key_is_value=False,
            sliding=None,
        )

    def window(self, index: int) -> int | None:
        """Positions that a query of a layer sees, itself among them; None: all before it."""
        if self.sliding is None or index not in self.sliding.layers:
            return None
        return self.sliding.window

    @property
    def embed_scale(self) -> float:
        """What embeddings are multiplied with when they are looked up."""
        return self.hidden_size**0.5 if self.gemma else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftingConfig(TransformerConfig):
    """What drafters of every kind have: how much they draft, and what of the target they see.

    Its layers are of the target's kind; those for a Llama target are Qwen3's.

    `target_layer_ids` are 0-based decoder layers of the target, -1 being the embedding output.
    The last layer is not allowed: reference checkpoints cannot tap it before the final norm.
    """

    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    confidence_head: bool = True
    num_anchors: int = 512
    draft_vocab_size: int | None = None
    """Tokens that may be drafted, the most frequent ones; None: all."""

    def __post_init__(self):
        super().__post_init__()
        require(self.model_type != "llama", "model_type='llama': expected 'qwen3' or 'gemma4'")
        for name in ("block_size", "num_anchors"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}: expected a whole number above 0")
        require(
            self.draft_vocab_size is None or 1 <= self.draft_vocab_size < self.vocab_size,
            f"draft_vocab_size={self.draft_vocab_size}: expected a number in"
            f" 1..{self.vocab_size - 1}, or none at all",
        )

    @property
    def output_size(self) -> int:
        """Tokens that a draft is chosen from."""
        return self.draft_vocab_size or self.vocab_size

    def _check_taps(self) -> None:
        last = self.num_target_layers - 1
        ids = self.target_layer_ids
        require(len(ids) > 0, "target_layer_ids is empty: expected at least one layer to tap")
        require(
            all(-1 <= i < last for i in ids) and len(set(ids)) == len(ids),
            f"target_layer_ids={list(ids)}: expected different layers in -1..{last - 1}"
            f" (the last layer, {last}, cannot be tapped)",
        )

    @property
    def confidence_width(self) -> int:
        """Inputs of the confidence head."""
        return self.hidden_size

    @property
    def reads_tokens(self) -> bool:
        """Whether its context is made of tokens too, each beside the state of the one before."""
        return False

    @property
    def least_context(self) -> int:
        """Positions that must lie between the start of a document and an anchor in it."""
        return 1 if self.reads_tokens else 0

    @classmethod
    def for_target(cls, target: TargetConfig, **settings) -> Self:
        """A drafter with the target's widths, heads and RoPE; `settings` are the other fields.

        Of a target with sliding layers they are those of the others.
        """
        fields: dict[str, Any] = {"num_target_layers": target.num_layers}
        for field in dataclasses.fields(TransformerConfig):
            if field.name != "num_layers":
                fields[field.name] = getattr(target, field.name)
        fields["model_type"] = "gemma4" if target.gemma else "qwen3"
        return cls(**(fields | settings))

    def check_fits(self, target: TargetConfig) -> None:
        """Raises `InputError` when this drafter was made for another target."""
        for mine, theirs, what in (
            (self.hidden_size, target.hidden_size, "hidden_size"),
            (self.vocab_size, target.vocab_size, "vocab_size"),
            (self.num_target_layers, target.num_layers, "num_target_layers"),
            (self.gemma, target.gemma, "whether its layers are Gemma4's"),
        ):
            require(
                mine == theirs,
                f"the drafter does not fit the target: {what} is {mine} in the drafter and"
                f" {theirs} in the target",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(DraftingConfig):
    """A DSpark drafter; with `head="none"` and no confidence head it is DFlash."""

    mask_token_id: int
    head: HeadKind = "vanilla"
    markov_rank: int = 256
    confidence_with_markov: bool = True

    def __post_init__(self):
        super().__post_init__()
        require(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id={self.mask_token_id}: expected an id in 0..{self.vocab_size - 1}",
        )
        self._check_taps()
        require(self.head in HEADS, f"head={self.head!r}: expected one of {', '.join(HEADS)}")
        require(
            (self.markov_rank > 0) == (self.head != "none"),
            f"markov_rank={self.markov_rank} with head={self.head!r}: expected rank 0 exactly when"
            " there is no sequential head",
        )
        require(
            self.markov_rank > 0 or not (self.confidence_head and self.confidence_with_markov),
            "markov_rank=0 with a confidence head that reads the Markov embedding: expected"
            " markov_rank > 0 or confidence_with_markov=false",
        )

    @property
    def confidence_width(self) -> int:
        return self.hidden_size + (self.markov_rank if self.confidence_with_markov else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(DraftingConfig):
    """A drafter of one layer that makes a token at a time: Eagle3 or MTP-1."""

    confidence_head: bool = False

    def __post_init__(self):
        super().__post_init__()
        require(self.num_layers == 1, f"num_layers={self.num_layers}: expected 1, the only layer")
        require(not self.gemma, "a Gemma4 target: expected a DSpark drafter, others know none")

    @property
    def reads_tokens(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(RecurrentConfig):
    """An Eagle3 drafter; `block_size` is the number of steps that it was trained to take.

    `step_loss_decay` is what each step weighed in training, as a part of the one before.
    """

    step_loss_decay: float = 0.8

    def __post_init__(self):
        super().__post_init__()
        self._check_taps()
        require(
            0 < self.step_loss_decay <= 1,
            f"step_loss_decay={self.step_loss_decay}: expected a number above 0, at most 1",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig(RecurrentConfig):
    """A multi-token prediction block as in DeepSeek-V3, used for one draft a round.

    It taps no layer: it reads the target's state behind the final norm. `qk_norm` says whether the
    target's blocks, which its own is like, normalise queries and keys.
    """

    block_size: int = 1
    target_layer_ids: tuple[int, ...] = ()
    qk_norm: bool = True

    def __post_init__(self):
        super().__post_init__()
        require(
            self.block_size == 1,
            f"block_size={self.block_size}: expected 1, MTP-1 drafts one token a round",
        )
        require(
            not self.target_layer_ids,
            f"target_layer_ids={list(self.target_layer_ids)}: expected none, MTP-1 reads the"
            " target's last state",
        )
