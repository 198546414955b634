"""What goes into a batch and what comes out: requests and completions."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from dspark_jax.config import require


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to continue it. Temperature 0 is greedy."""

    token_ids: Sequence[int] | np.ndarray
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stream: int = 0
    """Requests with the same seed draw independently when their streams differ."""
    stop: Sequence[str] = ()
    """Texts that end the completion, and are not part of its text."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def check(self, *, vocab_size: int, max_position: int) -> None:
        """Raises `InputError` when this cannot be decoded."""
        ids, room = self.token_ids, max_position
        require(len(ids) > 0, "the prompt is empty: expected at least one token")
        bad = next((i for i in ids if not 0 <= i < vocab_size), None)
        require(bad is None, f"token id {bad}: expected 0..{vocab_size - 1}")
        require(
            self.max_new_tokens >= 1,
            f"max_new_tokens={self.max_new_tokens}: expected a whole number above 0",
        )
        require(
            len(ids) < room,
            f"the prompt of {len(ids)} tokens leaves no room: the target holds {room} positions",
        )
        require(
            not isinstance(self.stop, str) and all(isinstance(s, str) and s for s in self.stop),
            f"stop={reprlib.repr(self.stop)}: expected texts that are not empty",
        )
        for name, valid, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 or above"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) or above, below 2^31"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "in 0..1"),
            ("seed", 0 <= self.seed < 2**32, "in 0..2^32-1"),
        ):
            require(valid, f"{name}={getattr(self, name)}: expected a number {expected}")


@dataclasses.dataclass
class Completion:
    """What came out for one request. The first token is the prefill's; rounds made the rest."""

    prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: Literal["stop", "length"]
    accepted_lengths: list[int]
    """Tokens each round added, the target's own included; 1 + their sum is len(token_ids)."""
    verified_lengths: list[int]
    """Drafts that each round sent to the target."""
    accepted_drafts: list[int]
    """Drafts accepted in each round, before the last was cut at a stop token or the limit."""
    confidences: list[list[float]] | None
    """Confidences c_k of each round's block, with `trace`; None without a confidence head."""
    confidence_logits: list[list[float]] | None
    """What they are the sigmoids of."""
    logprobs: list[float] | None = None
    """Natural logarithms of the target's probability of each token, at temperature 1 whatever the
    request's, where they were asked for."""
    drafts: list[list[int]] | None = None
    """Token ids of each round's block, with `trace`: accepted, rejected and never verified."""
    drafted_lengths: list[int] = dataclasses.field(default_factory=list)
    """Drafts that each round made."""

    @property
    def full_rounds(self) -> list[int]:
        """Accepted lengths of the rounds that were not cut."""
        rounds = zip(self.accepted_lengths, self.accepted_drafts, strict=True)
        return [n for n, drafts in rounds if n == drafts + 1]
