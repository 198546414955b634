"""What a load test found: figures by concurrency and policy, a table and two pictures of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dspark_jax.scheduler import Policy
from infer import load, pictures
from infer.stages import Stages

ROOM = 1.08
"""Of an axis, beside its largest value: for markers and numbers."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a policy did at a concurrency; means are over all rounds of all repeats."""

    concurrency: int
    policy: Policy
    tokens_per_second: float
    """Of all users together, the median over repeats."""
    tokens_per_second_by_repeat: tuple[float, ...]
    tokens_per_second_per_user: float
    tokens: int
    """In all repeats together."""
    verified_tokens_per_request: float | None
    """Tokens that the target read for a request in a round, its anchor included."""
    drafts_per_round: float | None
    mean_accepted_length: float | None
    time_shares: Stages
    """Of the time of rounds; see `infer.stages`."""


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Throughput of `delayed`, relative to the policy that is the best without it."""

    concurrency: int
    best_other: Policy
    ratio: load.Ratio


def compare(results: Sequence[Result]) -> list[Ratio]:
    """`delayed` and the best other policy by their medians, at each concurrency that has both.

    The best is chosen by the runs that it is then compared with, which is in its favour.
    """
    found = []
    for ours in results:
        others = [r for r in results if r.concurrency == ours.concurrency and r.policy != "delayed"]
        if ours.policy == "delayed" and others:
            best = max(others, key=lambda r: r.tokens_per_second)
            ratio = load.paired_ratio(
                ours.tokens_per_second_by_repeat, best.tokens_per_second_by_repeat
            )
            found.append(Ratio(ours.concurrency, best.policy, ratio))
    return found


def describe(results: Sequence[Result], ratios: Sequence[Ratio]) -> Iterator[str]:
    """Lines of a table."""
    names = ("tokens/s", "per user", "drafts", "verified", "accepted", "draft", "sched.", "verify")
    yield f"{'users':>5} {'policy':9}" + "".join(f"{name:>10}" for name in names)
    for r in results:
        means = (r.drafts_per_round, r.verified_tokens_per_request, r.mean_accepted_length)
        parts = (r.time_shares.draft, r.time_shares.schedule, r.time_shares.verify)
        yield (
            f"{r.concurrency:5} {r.policy:9}{r.tokens_per_second:10,.0f}"
            f"{r.tokens_per_second_per_user:10,.1f}"
            + "".join(f"{'-':>10}" if x is None else f"{x:10.2f}" for x in means)
            + "".join(f"{x:10.1%}" for x in parts)
        )
    for r in ratios:
        line = f"{r.concurrency:5} delayed: {r.ratio.mean:.3f} times {r.best_other}"
        if r.ratio.low is not None:
            line += f", 95 % interval {r.ratio.low:.3f} to {r.ratio.high:.3f}"
        yield line


def drawings(results: Sequence[Result]) -> Iterator[tuple[str, pictures.Draw]]:
    """Names without ending, and what there is to be seen of the results."""
    yield "throughput", lambda figure: plot_throughput(figure, results)
    yield "concurrency", lambda figure: plot_concurrency(figure, results)


def plot_throughput(figure: Any, results: Sequence[Result]) -> None:
    """Throughput against speed for a user; a point is a concurrency."""
    figure.set_size_inches(9, 4.8)
    axis = figure.subplots()
    for policy, own in _by_policy(results):
        x = [r.tokens_per_second_per_user for r in own]
        y = [r.tokens_per_second for r in own]
        (line,) = axis.plot(x, y, label=policy)
        for r in own:
            axis.annotate(
                str(r.concurrency),
                (r.tokens_per_second_per_user, r.tokens_per_second),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize="small",
                color=line.get_color(),
            )
    axis.set(xlabel="tokens/s of a user (numbers: users at once)", ylabel="tokens/s of all users")
    users = max(r.tokens_per_second_per_user for r in results)
    axis.set(xlim=(0, ROOM * users), ylim=(0, ROOM * max(r.tokens_per_second for r in results)))
    pictures.below(figure, axis)


def plot_concurrency(figure: Any, results: Sequence[Result]) -> None:
    """Throughput and verified tokens against concurrency."""
    figure.set_size_inches(9, 4.8)
    left, right = figure.subplots(1, 2)
    there = sorted({r.concurrency for r in results})
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(there, [str(n) for n in there])
        axis.set(xlabel="users at once")
    for policy, own in _by_policy(results):
        x = [r.concurrency for r in own]
        left.plot(x, [r.tokens_per_second for r in own], label=policy)
        verified = [r.verified_tokens_per_request or np.nan for r in own]
        right.plot(x, verified, label=policy)
    most = max(r.tokens_per_second for r in results)
    left.set(ylabel="tokens/s of all users", ylim=(0, ROOM * most))
    right.set(ylabel="verified tokens of a request and round", ylim=(0, None))
    pictures.below(figure, left)


def _by_policy(results: Sequence[Result]) -> Iterator[tuple[Policy, list[Result]]]:
    for policy in dict.fromkeys(r.policy for r in results):
        own = [r for r in results if r.policy == policy]
        yield policy, sorted(own, key=lambda r: r.concurrency)
