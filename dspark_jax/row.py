"""A request in its row of a batch: what the rounds have added to it, and when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from dspark_jax.request import Request
from dspark_jax.rounds import RoundLog

Decode = Callable[[list[int]], str]
"""Text of token ids."""


@dataclasses.dataclass
class Row:
    """A request that is being decoded: what it has gained so far."""

    number: int
    """Of the request."""
    request: Request
    token_ids: list[int] = dataclasses.field(default_factory=list)
    accepted_lengths: list[int] = dataclasses.field(default_factory=list)
    drafted_lengths: list[int] = dataclasses.field(default_factory=list)
    verified_lengths: list[int] = dataclasses.field(default_factory=list)
    accepted_drafts: list[int] = dataclasses.field(default_factory=list)
    drafts: list[list[int]] = dataclasses.field(default_factory=list)
    confidence_logits: list[list[float]] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    """None while it goes on."""
    stopped_at: str | None = None
    """The stop string that ended it."""

    def begin(self, token: int, logprob: float | None) -> None:
        """Takes the first token, which the prefill made."""
        self.token_ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)

    def take(self, log: RoundLog, row: int) -> None:
        """Takes what the rounds of a call did in one row of the batch."""
        emitted = log.emitted[:, row]
        rounds = emitted > 0
        if not rounds.any():
            return
        kept = np.arange(log.tokens.shape[2]) < emitted[:, None]
        self.token_ids += log.tokens[:, row][kept].tolist()
        self.accepted_lengths += emitted[rounds].tolist()
        self.drafted_lengths += [log.tokens.shape[2] - 1] * int(rounds.sum())
        self.verified_lengths += log.verified[rounds, row].tolist()
        self.accepted_drafts += log.accepted[rounds, row].tolist()
        if log.drafts is not None:
            self.drafts += log.drafts[rounds, row].tolist()
        if log.confidence_logits is not None:
            self.confidence_logits += log.confidence_logits[rounds, row].tolist()
        if log.logprobs is not None:
            self.logprobs += log.logprobs[:, row][kept].tolist()

    def end(self, active: bool, stop_token_ids: Sequence[int], text_of: Decode) -> None:
        """Notes whether it is done: a stop string, a stop token or the limit."""
        if self.request.stop and self._cut(text_of):
            self.finish_reason = "stop"
        elif not active:
            stopped = self.token_ids[-1] in stop_token_ids
            self.finish_reason = "stop" if stopped else "length"

    def _cut(self, text_of: Decode) -> bool:
        """Drops the tokens behind the one that completes a stop string."""
        text = text_of(self.token_ids)
        found = [s for s in self.request.stop if s in text]
        if not found:
            return False
        # The one that is complete first, as if tokens had come one at a time.
        self.stopped_at = min(found, key=lambda s: (text.index(s) + len(s), text.index(s)))
        # Nothing was found when the earlier rounds came, so that only a few tokens are tried.
        count = len(self.token_ids)
        while count > 1 and self.stopped_at in text_of(self.token_ids[: count - 1]):
            count -= 1
        surplus = len(self.token_ids) - count
        del self.token_ids[count:], self.logprobs[count:]
        while surplus:
            dropped = min(surplus, self.accepted_lengths[-1])
            self.accepted_lengths[-1] -= dropped
            surplus -= dropped
            if not self.accepted_lengths[-1]:
                for rounds in (
                    *(self.accepted_lengths, self.drafted_lengths),
                    *(self.verified_lengths, self.accepted_drafts),
                ):
                    rounds.pop()
                for traced in (self.drafts, self.confidence_logits):
                    del traced[len(self.accepted_lengths) :]
        return True
