"""Pictures of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from infer.evaluation.estimates import Estimate
from infer.evaluation.findings import Curve, Findings, Reliability, depths
from infer.evaluation.sample import by
from infer.pictures import EDGES, FEW, Draw, below

LENGTH = "accepted length (tokens a round)"


def drawings(found: Findings) -> Iterator[tuple[str, Draw]]:
    """Names without ending, and what there is to be seen of the findings."""
    yield "accepted_length", lambda figure: plot_lengths(figure, found)
    yield "positions", lambda figure: plot_positions(figure, found)
    if depths(found):
        yield "depth", lambda figure: plot_depths(figure, found)
    if found.sizes_differ:
        yield "block_length", lambda figure: plot_blocks(figure, found)
    if found.sweeps:
        yield "thresholds", lambda figure: plot_thresholds(figure, found)
    for each in found.reliabilities:
        yield each.picture, lambda figure, r=each: plot_reliability(figure, r)


def plot_lengths(figure: Any, found: Findings) -> None:
    """Accepted length on every set of prompts, beside one another for the drafters."""
    sets = list(dict.fromkeys((m.domain, m.dataset) for m in found.measurements))
    figure.set_size_inches(max(6.0, 1.3 * len(sets) + 2.5), 4.2)
    axis = figure.subplots()
    for n, drafter in enumerate(found.drafters):
        own = found.of(drafter)
        step = 0.5 / len(found.drafters)
        x = np.arange(len(own)) + (n - (len(found.drafters) - 1) / 2) * step
        bars(axis, x, [m.accepted_length for m in own], drafter.title, line=False)
    axis.set_xticks(range(len(sets)), [f"{dataset}\n({domain})" for domain, dataset in sets])
    axis.set(ylabel=LENGTH, ylim=(1, None), xlim=(-0.5, len(sets) - 0.5))
    axis.grid(False, axis="x")
    below(figure, axis)


def plot_positions(figure: Any, found: Findings) -> None:
    """Conditional acceptance by position, a panel a domain."""
    longest = max(d.block_size for d in found.drafters)
    for axis, domain in panels(figure, [p.domain for p in found.positions]):
        for drafter in found.drafters:
            (own,) = [p for p in found.positions if (p.domain, p.draft) == (domain, drafter.name)]
            x = np.arange(1, drafter.block_size + 1)
            bars(axis, x, own.conditional_acceptance, drafter.title)
        axis.set(title=domain, xlabel="position in the block", ylim=EDGES)
        axis.set_xticks(range(1, longest + 1))
    figure.axes[0].set_ylabel("accepted, of those behind accepted ones")
    below(figure, figure.axes[0])


def plot_depths(figure: Any, found: Findings) -> None:
    """Accepted length against draft layers; a line joins drafters that are alike but for these."""
    groups = depths(found)
    for axis, domain in panels(figure, [d.domain for d in found.domains]):
        for own in groups:
            lengths = [found.length(drafter, domain).accepted_length for drafter in own]
            x = [drafter.config.num_layers for drafter in own]
            bars(axis, x, lengths, ", ".join(d.name for d in own))
        axis.set(title=domain, xlabel="draft layers")
        axis.xaxis.get_major_locator().set_params(integer=True)
    # When all is drawn, since the panels share it.
    figure.axes[0].set(ylabel=LENGTH, ylim=(1, None))
    below(figure, figure.axes[0])


def plot_blocks(figure: Any, found: Findings) -> None:
    """Accepted length against block length."""
    for axis, domain in panels(figure, [d.domain for d in found.domains]):
        for drafter in found.drafters:
            own = [d for d in found.domains if (d.domain, d.draft) == (domain, drafter.name)]
            own.sort(key=lambda d: d.block_size)
            bars(axis, [d.block_size for d in own], [d.accepted_length for d in own], drafter.name)
        axis.set(title=domain, xlabel="drafts a round")
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.axes[0].set(ylabel=LENGTH, ylim=(1, None))
    below(figure, figure.axes[0])


def plot_thresholds(figure: Any, found: Findings) -> None:
    """Above what a threshold verifies, below what of it is accepted; crosses were decoded."""
    domains = list(dict.fromkeys(s.domain for s in found.sweeps))
    figure.set_size_inches(max(6.0, 3.4 * len(domains) + 0.6), 6.4)
    grid = figure.subplots(2, len(domains), squeeze=False, sharex=True, sharey="row")
    for row, name, label in zip(
        grid,
        ("verified", "accepted"),
        ("verified, of the drafts made", "accepted, of the verified"),
        strict=True,
    ):
        for axis, domain in zip(row, domains, strict=True):
            for own in (s for s in found.sweeps if s.domain == domain):
                curve: Estimate = getattr(own, name)
                (line,) = axis.plot(own.thresholds, curve.value, markersize=3, label=own.draft)
                axis.fill_between(
                    own.thresholds, curve.low, curve.high, alpha=0.2, color=line.get_color()
                )
                for mark in found.decoded:
                    if (mark.domain, mark.draft) == (domain, own.draft):
                        color, at = line.get_color(), [mark.threshold]
                        bars(axis, at, [getattr(mark, name)], None, marker="x", color=color)
            axis.set(ylim=EDGES)
        row[0].set_ylabel(label)
    for axis, domain in zip(grid[0], domains, strict=True):
        axis.set_title(domain)
    for axis in grid[1]:
        axis.set_xlabel("confidence threshold")
    if found.decoded:
        grid[0][0].plot([], [], "x", linestyle="", color="0.5", label="decoded with the threshold")
    below(figure, grid[0][0])


def plot_reliability(figure: Any, found: Reliability) -> None:
    """Observed against predicted survival, a panel a position, and the calibration errors."""
    size = len(found.raw.error)
    columns = min(4, size + 1)
    rows = math.ceil((size + 1) / columns)
    figure.set_size_inches(2.9 * columns + 0.4, 2.9 * rows + 0.7)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    curves = {"raw": found.raw}
    if found.scaled is not None:
        curves["after temperature scaling"] = found.scaled
    for k, axis in enumerate(axes[:size]):
        axis.plot([0, 1], [0, 1], color="0.6", linewidth=1, marker="")
        for label, curve in curves.items():
            _plot_curve(axis, curve, k, label)
        axis.set(title=f"position {k + 1}", xlim=EDGES, ylim=EDGES)
        axis.set_xticks((0, 0.5, 1))
        axis.set_yticks((0, 0.5, 1))
    for axis in axes[:size:columns]:
        axis.set_ylabel("prefixes accepted")
    for axis in axes[max(0, size - columns) : size]:
        axis.set_xlabel("predicted survival")
    last = axes[size]
    for label, curve in curves.items():
        last.plot(range(1, size + 1), 100 * curve.error, label=label)
    last.set(title="calibration error", xlabel="position", ylabel="ECE (%)", ylim=(0, None))
    last.set_xticks(range(1, size + 1))
    for axis in axes[size + 1 :]:
        axis.set_visible(False)
    figure.suptitle(f"{found.draft}, {found.rounds:,} rounds", fontsize="medium")
    below(figure, last)


def _plot_curve(axis: Any, curve: Curve, k: int, label: str) -> None:
    seen = curve.count[k] >= FEW
    observed = curve.observed[k]
    own = Estimate(observed.value[seen], observed.low[seen], observed.high[seen])
    bars(axis, curve.predicted[k][seen], own, label)


def bars(
    axis: Any,
    x: Any,
    y: Estimate | Sequence[Estimate],
    label: str | None,
    *,
    line: bool = True,
    **style: Any,
) -> None:
    """Points with their intervals."""
    if not isinstance(y, Estimate):
        y = Estimate(*(np.array([getattr(e, n) for e in y]) for n in ("value", "low", "high")))
    # An interval of few prompts need not hold the figure, and a bar has no negative length.
    reach = np.maximum(0, [y.value - y.low, y.high - y.value])
    style = {"linestyle": "-" if line else "", "capsize": 2.5, "elinewidth": 1, **style}
    axis.errorbar(x, y.value, yerr=reach, label=label, **style)


def panels(figure: Any, domains: Sequence[str]) -> list[tuple[Any, str]]:
    """Axes side by side with one scale, for different domains."""
    different = [domain for domain, _ in by(domains, lambda d: d)]
    figure.set_size_inches(max(5.0, 3.4 * len(different) + 0.6), 4)
    axes = figure.subplots(1, len(different), squeeze=False, sharey=True)[0]
    return list(zip(axes, different, strict=True))
