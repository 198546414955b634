"""The options of `infer.generate`, and what is wrong with them whatever the models are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from dspark_jax import generation
from dspark_jax.config import InputError, require
from dspark_jax.generation import EMBEDDED, Pair, Request
from dspark_jax.scheduler import Policy
from infer import results


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `infer.generate`."""

    target: str | None = None
    """Hugging Face folder or repository id of the target; default: the one in the package."""
    draft: str | None = None
    """The same of its drafter, or none for plain decoding; default: the one in the package."""
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
    slots: int = 8
    """Prompts that are decoded together."""
    policy: Literal["fixed", "threshold", "causal", "delayed", "none"] | None = None
    """How many drafts are verified: all, those the drafter is confident of, or none. causal and
    delayed come in a later version. Default: fixed, or none without a drafter."""
    block_size: int | None = None
    """Drafts a round, at most what the drafter was trained for, which is the default."""
    confidence_threshold: float | None = None
    """Least confidence of a verified draft, in 0..1, for the policy threshold."""
    cost_table: Path | None = None
    """For causal and delayed, in a later version."""
    calibration: Path | None = None
    """Of confidences, in a later version."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters, activations and caches."""
    summary: Path | None = None
    """JSON file for the figures of the run: speed, accepted length, acceptance by position."""
    trace: bool = False
    """Add verified lengths and confidences of every round to the results."""
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
    def scheduling(self) -> Policy | None:
        """The policy, if there is one and this version has it."""
        if self.policy in ("causal", "delayed"):
            raise InputError(
                f"--policy {self.policy}: comes in a later version, expected fixed, threshold or"
                " none"
            )
        return self.policy

    @property
    def defaults(self) -> Request:
        """A request with these settings, without its prompt."""
        names = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed")
        return Request(token_ids=(0,), **{name: getattr(self, name) for name in names})

    def check(self) -> None:
        """Raises `InputError` for what is wrong whatever the models are."""
        for option, value in (("cost-table", self.cost_table), ("calibration", self.calibration)):
            require(value is None, f"--{option}: comes in a later version, expected to be absent")
        policy = self.scheduling
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
            self.block_size is None or self.drafts,
            "--block-size: expected with a drafter only, not with --draft none",
        )
        threshold = policy == "threshold"
        require(
            self.confidence_threshold is None or threshold,
            "--confidence-threshold: expected with --policy threshold only",
        )
        require(
            not threshold or self.confidence_threshold is not None,
            "--policy threshold: expected --confidence-threshold, a number in 0..1",
        )
        require(
            self.summary is None or self.prompts is not None,
            "--summary: expected with --prompts only",
        )
        files = [p.resolve() for p in (self.prompts, self.output, self.summary) if p is not None]
        require(
            len(set(files)) == len(files),
            "--prompts, --output and --summary: expected different files",
        )
        self.defaults.check(vocab_size=1, max_position=2)
        for option, path in (("--output", self.output), ("--summary", self.summary)):
            if path is not None:
                results.check_place(path, option)

    def load(self) -> Pair:
        draft = EMBEDDED / "drafter" if self.draft is None else self.draft
        return generation.load(
            EMBEDDED / "target" if self.target is None else self.target,
            draft if self.drafts else None,
            dtype=jnp.dtype(self.dtype),
            block_size=self.block_size,
        )

    def decisive(self) -> dict[str, Any]:
        """What the results depend on, as JSON."""
        names = {f.name for f in dataclasses.fields(self)} - {
            *("target", "draft", "prompts", "output", "summary"),
            *("slots", "compare_baseline", "cost_table", "calibration"),
        }
        models = {"target": _where(self.target), "draft": _where(self.draft)}
        return models | {name: getattr(self, name) for name in sorted(names)}


def _where(model: str | None) -> str | None:
    """A folder, wherever the command was started."""
    return str(Path(model).resolve()) if model is not None and Path(model).is_dir() else model
