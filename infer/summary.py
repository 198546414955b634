"""Figures of a run: speed, accepted length, and acceptance by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.request import Completion
from dspark_jax.state import block_size
from infer.engine import Engine, Run
from infer.models import devices_of


def mean(values: Sequence[float]) -> float | None:
    """None of nothing: JSON has no NaN."""
    return sum(values) / len(values) if values else None


def mean_accepted_length(completions: Sequence[Completion]) -> float | None:
    """Tokens a round added, over the rounds that no stop token or limit cut."""
    return mean([length for c in completions for length in c.full_rounds])


def tried_and_passed(completions: Sequence[Completion], size: int) -> tuple[list[int], list[int]]:
    """By position 1..`size`: drafts verified with all before accepted, and those accepted.

    Of a round that was cut, what lies behind the cut is not counted, neither way.
    """
    tried, passed = [0] * size, [0] * size
    for c in completions:
        rounds = zip(c.accepted_lengths, c.verified_lengths, c.accepted_drafts, strict=True)
        for emitted, verified, accepted in rounds:
            for k in range(min(verified, accepted + 1, emitted)):
                tried[k] += 1
                passed[k] += k < accepted
    return tried, passed


def conditional_acceptance(completions: Sequence[Completion], size: int) -> list[float | None]:
    """By position 1..`size`: drafts accepted, of those verified with all before accepted.

    None where nothing was verified; see `tried_and_passed`.
    """
    tried, passed = tried_and_passed(completions, size)
    return [p / t if t else None for p, t in zip(passed, tried, strict=True)]


def summarise(engine: Engine, run: Run) -> dict[str, Any]:
    """What a run decoded, as JSON.

    `wall_seconds` is the time of prefill and rounds, which `compile_seconds` is not part of, and
    `tokens_per_second` what came out in it, all rows together. `rounds` counts the rounds of every
    request, and `verified_tokens_per_request` is the mean over them of the tokens that the target
    read for a request, its anchor included.
    """
    verified = [1 + n for c in run.completions for n in c.verified_lengths]
    size = block_size(engine.pair.models, engine.cfg)
    return {
        "requests": len(run.completions),
        "prompt_tokens": sum(c.prompt_tokens for c in run.completions),
        "completion_tokens": run.tokens,
        "tokens_per_second": run.tokens_per_second,
        "mean_accepted_length": mean_accepted_length(run.completions),
        "rounds": len(verified),
        "verified_tokens_per_request": mean(verified),
        "conditional_acceptance": conditional_acceptance(run.completions, size),
        "compile_seconds": run.compile_seconds,
        "wall_seconds": run.seconds,
        "policy": engine.cfg.policy,
        "block_size": size,
        "slots": engine.shape.rows,
        "device": devices_of(engine.pair.models),
    }


def compare(run: Run, plain: Run) -> dict[str, Any]:
    """Speed-up over plain decoding of the same requests, in tokens a second.

    `baseline_mismatches` counts greedy requests whose tokens differ, which in float32 none does;
    None when no request is greedy. All figures are None when nothing was decoded.
    """
    rate, plain_rate = run.tokens_per_second, plain.tokens_per_second
    both = zip(run.requests, run.completions, plain.completions, strict=True)
    differ = [a.token_ids != b.token_ids for request, a, b in both if request.greedy]
    return {
        "speedup": rate / plain_rate if rate and plain_rate else None,
        "baseline_tokens_per_second": plain_rate,
        "baseline_mismatches": sum(differ) if differ else None,
    }


def in_words(figures: Mapping[str, Any]) -> str:
    """The figures that one wants to see first, in one line."""
    if not figures["requests"]:
        return "nothing was left to decode"
    parts = [
        f"{figures['requests']} completions",
        f"{figures['completion_tokens']:,} tokens",
        f"{figures['tokens_per_second']:,.0f} tokens/s",
    ]
    if figures["mean_accepted_length"] is not None:
        parts.append(f"accepted length {figures['mean_accepted_length']:.2f}")
    if figures.get("speedup") is not None:
        parts.append(f"{figures['speedup']:.2f} times plain decoding")
    return ", ".join(parts)
