"""Settings of a training run: typed, checked, and each a command-line option.

`configs/` holds presets of them. Field docstrings are the help texts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Literal

from dspark_jax.config import (
    DrafterConfig,
    DraftingConfig,
    Eagle3Config,
    HeadKind,
    MtpConfig,
    TargetConfig,
    require,
)
from dspark_jax.losses import LossConfig
from dspark_jax.self_attention import AttentionKind

EMBEDDED, STDLIB, STDLIB_HELD_OUT = "embedded", "stdlib", "stdlib_held_out"


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

    kind: Literal["dspark", "eagle3", "mtp"] = "dspark"
    """dspark drafts a block at once; eagle3 and mtp have one layer and draft a token at a time."""
    num_layers: int = 2
    """Layers of the backbone."""
    block_size: int = 7
    """K, drafted tokens a round; of mtp 1."""
    head: HeadKind = "vanilla"
    """Sequential head: none is DFlash, vanilla is Markov."""
    markov_rank: int = 32
    """Rank of the sequential head; 0 when there is none."""
    confidence_head: bool = True
    """Learn how far each slot is to be trusted."""
    confidence_with_markov: bool = True
    """The confidence head also reads the embedding of the token before."""
    target_layer_ids: tuple[int, ...] = (0, 1, 2)
    """Target layers to tap, from 0; -1 is the embedding; the last cannot be tapped. mtp taps none:
    it reads the state behind the final norm."""
    mask_token_id: int = 3
    """Id of the target's vocabulary that stands for a token not yet drafted."""
    num_anchors: int = 24
    """A, blocks drafted a document and step."""
    draft_vocab_size: int | None = None
    """Draft the most frequent tokens of the training data alone, so many; default: all tokens."""

    def __post_init__(self):
        _positive(self, "num_anchors")
        require(
            self.kind == "dspark"
            or (self.head == "none" and not self.markov_rank and not self.confidence_with_markov),
            f"kind={self.kind!r} with head={self.head!r}, markov_rank={self.markov_rank},"
            f" confidence_with_markov={self.confidence_with_markov}: expected 'none', 0 and False,"
            " a sequential head belongs to 'dspark'",
        )

    def config(self, target: TargetConfig) -> DraftingConfig:
        """The drafter for this target; raises `InputError` when they do not go together."""
        names = ["num_layers", "block_size", "confidence_head", "target_layer_ids", "num_anchors"]
        names.append("draft_vocab_size")
        if self.kind == "dspark":
            names += ["head", "markov_rank", "confidence_with_markov", "mask_token_id"]
        fields = {name: getattr(self, name) for name in names}
        match self.kind:
            case "dspark":
                return DrafterConfig.for_target(target, **fields)
            case "eagle3":
                return Eagle3Config.for_target(target, **fields)
            case "mtp":
                return MtpConfig.for_target(target, qk_norm=target.qk_norm, **fields)


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Data."""

    files: tuple[str, ...] = (STDLIB,)
    """Text files, or JSONL files with messages, conversations, prompt and response, or text on each
    line; `stdlib` is the Python standard library's sources."""
    bad_records: int = 0
    """Bad lines of JSONL files that are passed over at most. They are found at the start, and many
    mean that a file is not what one thinks: by default the first is an error."""
    thinking: bool = False
    """The target may think before it answers."""
    max_length: int = 192
    """S, tokens a row; longer texts are cut into several, longer chats end there."""
    documents_per_row: int = 4
    """Documents of a row that there is room for num_anchors blocks of; more of them share that room
    evenly. 1: no two documents share a row."""
    batch_size: int = 8
    """B, rows a step, over all devices."""

    def __post_init__(self):
        _positive(self, "batch_size", "documents_per_row")
        require(self.bad_records >= 0, f"bad_records={self.bad_records}: expected at least 0")
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
class GuardSettings:
    """Steps that are skipped: their loss or gradient is not finite, or out of line."""

    spike_factor: float = 20.0
    """Skip when the loss or the gradient's norm is more than this times its running mean."""
    spike_after: int = 50
    """Steps before the running mean is trusted."""
    max_skipped: int = 20
    """Skipped steps in a row at which training stops."""

    def __post_init__(self):
        require(self.spike_factor > 1, f"spike_factor={self.spike_factor}: expected above 1")
        _positive(self, "spike_after", "max_skipped")


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Evaluation on rows that are not trained on."""

    held_out_files: tuple[str, ...] | None = None
    """As `files`. By default the held-out part of `stdlib` when that is all of `files`, or none."""
    evaluate_every: int = 500
    """Steps between two evaluations; the last step has one too."""
    evaluate_batches: int = 4
    """Batches of held-out rows."""
    decode_every: int = 0
    """Steps between two decodings of held-out prompts; the last step has one too; 0: none."""
    decode_prompts: int = 4
    """Prompts that are decoded."""
    decode_tokens: int = 64
    """Tokens to decode for each."""

    def __post_init__(self):
        _positive(self, "evaluate_every", "evaluate_batches", "decode_prompts", "decode_tokens")
        require(self.decode_every >= 0, f"decode_every={self.decode_every}: expected at least 0")


@dataclasses.dataclass(frozen=True)
class WatchSettings:
    """Watching a run."""

    wandb: str | None = None
    """Project of Weights & Biases to report to, besides the files under the workdir."""
    peak_flops: float | None = None
    """Operations a second of one device, for `mfu`; default: known for common TPUs and GPUs."""
    profile: tuple[int, int] | None = None
    """First and last step of a trace, which is written to WORKDIR/profile for xprof."""

    def __post_init__(self):
        if self.peak_flops is not None:
            _positive(self, "peak_flops")
        if self.profile is not None:
            first, last = self.profile
            require(1 <= first <= last, f"profile={first} {last}: expected 1 <= first <= last")


@dataclasses.dataclass(frozen=True)
class ComputeSettings:
    """Computation."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the target, of the pass and of the exported drafter; master weights are float32."""
    anchor_chunk: int = 32
    """Blocks a row that are computed at a time."""
    microbatches: int = 1
    """Parts of a batch that are computed one after the other, for memory."""
    stack_layers: Literal["auto", "on", "off"] = "auto"
    """Compile one layer of the target instead of all; auto: when it has more than 8."""
    devices: int | None = None
    """Devices to use, all by default."""
    data_parallel: int = 1
    """Groups of devices that split the batch and hold the models once each. Of this and the next
    two one may be -1: what is left."""
    fsdp: int = -1
    """Devices of a group that split its part of the batch, and every matrix by its width."""
    tensor_parallel: int = 1
    """Devices that work on the same rows, each on its own heads, units and part of the
    vocabulary."""
    attention: AttentionKind = "reference"
    """Of the target over whole sequences: reference, dot_product (jax.nn), or splash (TPUs)."""

    def __post_init__(self):
        _positive(self, "anchor_chunk", "microbatches")


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """Hosts. Nothing need be said under Slurm, under Open MPI and on TPUs."""

    coordinator: str | None = None
    """HOST:PORT at which process 0 waits for the others; with the next two."""
    num_processes: int | None = None
    """Processes of the run."""
    process_id: int | None = None
    """Number of this one, from 0."""

    def __post_init__(self):
        given = (self.coordinator, self.num_processes, self.process_id)
        require(
            given.count(None) in (0, 3),
            f"coordinator={self.coordinator}, num_processes={self.num_processes},"
            f" process_id={self.process_id}: expected all three, or none",
        )
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            require(
                re.fullmatch(r"[\w.:\[\]-]+", host) is not None
                and re.fullmatch(r"\d{1,5}", port) is not None
                and 0 < int(port) < 2**16,
                f"coordinator={self.coordinator!r}: expected HOST:PORT, a port in 1..65535",
            )
        if self.num_processes is not None and self.process_id is not None:
            require(
                0 <= self.process_id < self.num_processes,
                f"process_id={self.process_id} of num_processes={self.num_processes}: expected a"
                " number from 0 to below it",
            )


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
    init_from: str | None = None
    """Drafter to go on training, a folder or repository id; in place of `start`."""
    features: str | None = None
    """Folder that `train.cache` has written: the target's hidden states are read from it, and its
    layers not loaded."""
    seed: int = 0
    """Of initial values, order of data, and anchors."""
    log_every: int = 50
    """Steps between two lines of metrics."""
    save_every: int = 500
    """Steps between two checkpoints."""
    keep: int = 2
    """Last checkpoints to keep."""
    keep_best: int = 1
    """Checkpoints to keep besides: those of the largest accepted length on held-out rows."""
    drafter: DrafterSettings = DrafterSettings()
    data: DataSettings = DataSettings()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerSettings = OptimizerSettings()
    guard: GuardSettings = GuardSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    watch: WatchSettings = WatchSettings()
    compute: ComputeSettings = ComputeSettings()
    hosts: HostSettings = HostSettings()

    def __post_init__(self):
        _positive(self, "log_every", "save_every", "keep")
        require(self.keep_best >= 0, f"keep_best={self.keep_best}: expected at least 0")
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
        decodes = self.evaluation.decode_every > 0
        require(
            self.features is None or not decodes,
            f"decode_every={self.evaluation.decode_every} with features={self.features}: expected"
            " 0, because nothing can be decoded without the target's layers",
        )

    @property
    def held_out_files(self) -> tuple[str, ...]:
        """Files of the rows to evaluate on; none: no evaluation."""
        if self.evaluation.held_out_files is not None:
            return self.evaluation.held_out_files
        return (STDLIB_HELD_OUT,) if self.data.files == (STDLIB,) else ()

    def drafter_config(self, target: TargetConfig) -> DraftingConfig:
        """The drafter to train; an Eagle3 drafter says how its steps were weighed."""
        cfg = self.drafter.config(target)
        if isinstance(cfg, Eagle3Config):
            decay = round(math.exp(-1 / self.loss.loss_decay), 6)
            return dataclasses.replace(cfg, step_loss_decay=decay)
        return cfg

    def shared(self) -> dict[str, object]:
        """Those of `flat` that all hosts of a run must have in common."""
        return {name: value for name, value in self.flat().items() if name != "process_id"}

    def flat(self) -> dict[str, object]:
        """All settings by name, as JSON values; names are unique across the groups."""
        found: dict[str, object] = {}
        for name, value in dataclasses.asdict(self).items():
            found |= value if isinstance(value, dict) else {name: value}
        found["workdir"] = str(self.workdir)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in found.items()}
