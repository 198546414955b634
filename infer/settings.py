"""The options of `infer.generate`, and what is wrong with them whatever the models are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from dspark_jax import generation
from dspark_jax.config import require
from dspark_jax.generation import EMBEDDED, Pair
from dspark_jax.io import files
from dspark_jax.request import Request
from infer import results
from infer.models import tensor_mesh
from infer.requests import MOST_SAMPLES, valid_samples

COSTED = ("causal", "delayed")
"""Policies that weigh drafts against what they cost."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `infer.generate`."""

    target: str | None = None
    """Hugging Face folder or repository id, or GGUF file, of the target; default: the one in the
    package."""
    draft: str | None = None
    """Folder or repository id of its drafter, or none for plain decoding; default: the one in the
    package."""
    prompts: Path | None = None
    """JSONL file to read; default: a few prompts of the package, printed with their figures."""
    output: Path | None = None
    """JSONL file for the results, in the order of the prompts."""
    temperature: float = 0.0
    """0 is greedy. This and the next four hold where a line has no setting of its own."""
    top_p: float = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: int = 0
    """Sampling from the k best; 0 is off."""
    min_p: float = 0.0
    """Least probability, as a part of the best token's; 0 is off."""
    max_new_tokens: int = 256
    """Most tokens to add to a prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion where they come up in it, and are left out of its text; a line's
    own go before them."""
    samples: int = 1
    """Completions of each prompt, which is read once for all of them; a line's own n goes before
    it."""
    slots: int = 8
    """Prompts that are decoded together."""
    policy: Literal["fixed", "threshold", "causal", "delayed", "none"] | None = None
    """How many drafts are verified: all, those that reach a confidence, or what pays by the cost
    table; delayed also chooses how many are made. Default: fixed, or none without a drafter."""
    block_size: int | None = None
    """Drafts a round, at most what the drafter was trained for, which is the default."""
    confidence_threshold: float | None = None
    """Least confidence of a verified draft, in 0..1, for the policy threshold."""
    cost_table: Path | None = None
    """What infer.profile wrote, for causal and delayed; without it costs are measured at the
    start."""
    calibration: Path | None = None
    """What infer.calibrate wrote, for threshold, causal and delayed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters, activations and caches."""
    tensor_parallel: int = 1
    """Devices that the models and the caches are split over."""
    summary: Path | None = None
    """JSON file for the figures of the run: speed, accepted length, acceptance by position."""
    trace: bool = False
    """Add verified lengths and confidences of every round to the results."""
    logprobs: bool = False
    """Add the target's log probability of every token to the results."""
    prompt_ids: bool = False
    """Add the tokens of the prompt to the results: `train.main --files` learns from such a file."""
    compare_baseline: bool = False
    """Decode the same prompts plainly as well, and give the speed-up."""
    ignore_eos: bool = False
    """Go on behind stop tokens."""
    thinking: bool = False
    """Let answers to chats start with thinking, where the chat template knows that."""
    seed: int = 0
    """Of all random draws; each line has its own."""

    @property
    def drafts(self) -> bool:
        return self.draft != "none"

    @property
    def defaults(self) -> Request:
        """A request with these settings, without its prompt."""
        names = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed", "stop")
        return Request(token_ids=(0,), **{name: getattr(self, name) for name in names})

    def check(self) -> None:
        """Raises `InputError` for what is wrong whatever the models are."""
        require(
            self.cost_table is None or self.policy in COSTED,
            "--cost-table: expected with --policy causal or delayed only",
        )
        require(
            self.calibration is None or self.policy in (*COSTED, "threshold"),
            "--calibration: expected with --policy threshold, causal or delayed only",
        )
        require(
            (self.prompts is None) == (self.output is None),
            "--prompts and --output: expected both, or neither for the prompts of the package",
        )
        require(
            self.target is None or self.draft is not None,
            "--target without --draft: expected a drafter, or --draft none for plain decoding",
        )
        require(self.slots >= 1, f"--slots {self.slots}: expected a whole number above 0")
        require(
            valid_samples(self.samples),
            f"--samples {self.samples}: expected a whole number in 1..{MOST_SAMPLES}",
        )
        require(
            self.block_size is None or self.drafts,
            "--block-size: expected with a drafter only, not with --draft none",
        )
        threshold = self.policy == "threshold"
        require(
            self.confidence_threshold is None or threshold,
            "--confidence-threshold: expected with --policy threshold only",
        )
        require(
            not threshold or self.confidence_threshold is not None,
            "--policy threshold: expected --confidence-threshold, a number in 0..1",
        )
        for option, given in (
            ("--summary", self.summary is not None),
            ("--samples", self.samples > 1),
            ("--logprobs", self.logprobs),
            ("--prompt-ids", self.prompt_ids),
        ):
            require(
                not given or self.prompts is not None, f"{option}: expected with --prompts only"
            )
        paths = [p.resolve() for p in (self.prompts, self.output, self.summary) if p is not None]
        require(
            len(set(paths)) == len(paths),
            "--prompts, --output and --summary: expected different files",
        )
        self.defaults.check(vocab_size=1, max_position=2)
        for option, path in (("--output", self.output), ("--summary", self.summary)):
            if path is not None:
                results.check_place(path, option)

    @property
    def folders(self) -> tuple[Path, Path | None]:
        """Of the target and the drafter, fetched where they are repositories."""
        target = EMBEDDED / "target" if self.target is None else self.target
        draft = EMBEDDED / "drafter" if self.draft is None else self.draft
        return files.resolve(target), files.resolve(draft) if self.drafts else None

    def load(self) -> Pair:
        target, draft = self.folders
        dtype = jnp.dtype(self.dtype)
        mesh = tensor_mesh(self.tensor_parallel)
        return generation.load(target, draft, dtype=dtype, block_size=self.block_size, mesh=mesh)

    def decisive(self) -> dict[str, Any]:
        """What the results depend on, as JSON."""
        names = {f.name for f in dataclasses.fields(self)} - {
            *("target", "draft", "prompts", "output", "summary"),
            *("slots", "compare_baseline", "cost_table", "tensor_parallel"),
        }
        models = {"target": _where(self.target), "draft": _where(self.draft)}
        others = {name: getattr(self, name) for name in sorted(names)}
        others["stop"] = list(self.stop)
        others["calibration"] = None if self.calibration is None else str(self.calibration)
        return models | others


def _where(model: str | None) -> str | None:
    """A folder or file, wherever the command was started."""
    return str(Path(model).resolve()) if model is not None and Path(model).exists() else model
