"""Settings of a training run: typed, checked, and each a command-line option.

`configs/` holds presets of them. Field docstrings are the help texts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from dspark_jax.config import DrafterConfig, HeadKind, TargetConfig, require
from dspark_jax.losses import LossConfig

EMBEDDED, STDLIB = "embedded", "stdlib"


def _positive(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(value > 0, f"{name}={value}: expected a number above 0")


def _fraction(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(0 <= value < 1, f"{name}={value}: expected a number from 0 to below 1")


@dataclasses.dataclass(frozen=True)
class DrafterSettings:
    """Drafter. Widths, heads and RoPE are the target's."""

    num_layers: int = 2
    """Layers of the backbone."""
    block_size: int = 7
    """K, drafted tokens a round."""
    head: HeadKind = "vanilla"
    """Sequential head: none is DFlash, vanilla is Markov."""
    markov_rank: int = 32
    """Rank of the sequential head; 0 when there is none."""
    confidence_head: bool = True
    """Learn how far each slot is to be trusted."""
    confidence_with_markov: bool = True
    """The confidence head also reads the embedding of the token before."""
    target_layer_ids: tuple[int, ...] = (0, 1, 2)
    """Target layers to tap, from 0; -1 is the embedding; the last cannot be tapped."""
    mask_token_id: int = 3
    """Id of the target's vocabulary that stands for a token not yet drafted."""
    num_anchors: int = 24
    """A, blocks drafted a sequence and step."""

    def __post_init__(self):
        _positive(self, "num_anchors")

    def config(self, target: TargetConfig) -> DrafterConfig:
        """The drafter for this target; raises `InputError` when they do not go together."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return DrafterConfig.for_target(target, **fields)


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Data."""

    files: tuple[str, ...] = (STDLIB,)
    """Text files, or JSONL files with messages, conversations or text on each line; `stdlib` is the
    Python standard library's sources."""
    max_length: int = 192
    """S, tokens a sequence; longer documents are cut into several."""
    batch_size: int = 8
    """B, sequences a step, over all devices."""

    def __post_init__(self):
        _positive(self, "batch_size")
        require(self.max_length >= 2, f"max_length={self.max_length}: expected at least 2")


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Optimiser, with linear warm-up and cosine decay to 0."""

    algorithm: Literal["adamw", "muon"] = "adamw"
    """muon orthogonalises the updates of matrices, and leaves the rest to AdamW."""
    steps: int = 1000
    """Updates in all."""
    learning_rate: float = 2e-3
    """Its peak."""
    warmup_fraction: float = 0.04
    """Part of the steps in which the learning rate rises."""
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Largest global norm of the gradient."""
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self):
        _positive(self, "steps", "learning_rate", "clip_norm")
        _fraction(self, "warmup_fraction", "beta1", "beta2")
        require(self.weight_decay >= 0, f"weight_decay={self.weight_decay}: expected at least 0")


@dataclasses.dataclass(frozen=True)
class ComputeSettings:
    """Computation."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the target, of the pass and of the exported drafter; master weights are float32."""
    anchor_chunk: int = 32
    """Blocks a sequence that are computed at a time."""
    microbatches: int = 1
    """Parts of a batch that are computed one after the other, for memory."""
    stack_layers: Literal["auto", "on", "off"] = "auto"
    """Compile one layer of the target instead of all; auto: when it has more than 8."""
    devices: int | None = None
    """Devices to use, all by default."""
    model_parallel: int = 1
    """Devices that share one copy of the models; the rest of them split the batch."""

    def __post_init__(self):
        _positive(self, "anchor_chunk", "microbatches", "model_parallel")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A training run."""

    workdir: Path = Path("runs/tiny")
    """Folder of checkpoints, metrics and the exported drafter; a run found there goes on."""
    target: str = EMBEDDED
    """Hugging Face folder or repository id, or GGUF file; `embedded` is the small target of this
    package."""
    start: Literal["random", "target"] = "random"
    """Initial values of the drafter's layers: drawn, or those of layers of the target."""
    seed: int = 0
    """Of initial values, order of data, and anchors."""
    log_every: int = 50
    """Steps between two lines of metrics."""
    save_every: int = 500
    """Steps between two checkpoints."""
    keep: int = 2
    """Checkpoints to keep."""
    drafter: DrafterSettings = DrafterSettings()
    data: DataSettings = DataSettings()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerSettings = OptimizerSettings()
    compute: ComputeSettings = ComputeSettings()

    def __post_init__(self):
        _positive(self, "log_every", "save_every", "keep")
        require(0 <= self.seed < 2**32, f"seed={self.seed}: expected a number in 0..{2**32 - 1}")
        require(
            self.data.batch_size % self.compute.microbatches == 0,
            f"microbatches={self.compute.microbatches}: expected a divisor of"
            f" batch_size={self.data.batch_size}",
        )
        require(
            self.drafter.confidence_head == (self.loss.confidence_weight > 0),
            f"confidence_weight={self.loss.confidence_weight} with"
            f" confidence_head={self.drafter.confidence_head}: expected a weight above 0 exactly"
            " when there is a confidence head",
        )

    def flat(self) -> dict[str, object]:
        """All settings by name, as JSON values; names are unique across the groups."""
        found: dict[str, object] = {}
        for name, value in dataclasses.asdict(self).items():
            found |= value if isinstance(value, dict) else {name: value}
        found["workdir"] = str(self.workdir)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in found.items()}
