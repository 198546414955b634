"""The report of an evaluation: tables for a terminal, and a page of Markdown with pictures."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from infer.evaluation.estimates import RESAMPLES, Estimate
from infer.evaluation.findings import DomainLength, Findings, Measurement, Reliability, depths
from infer.pictures import FEW


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """How, where and when it was measured."""

    command: str
    target: str
    dtype: str
    sampling: Mapping[str, float]
    """Temperature and the like, the limit of tokens, the seed."""
    thinking: bool
    device: str
    jax: str
    date: str
    sources: Mapping[str, str]
    """Where each drafter comes from."""

    @property
    def lines(self) -> list[str]:
        """In words."""
        sampling = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())
        return [
            self.command,
            f"{self.date}, {self.device}, jax {self.jax}",
            f"target {self.target} in {self.dtype}; {sampling}"
            + (", with thinking" if self.thinking else ""),
            *(f"drafter {name}: {path}" for name, path in self.sources.items()),
        ]


def figure_text(value: Any, digits: int = 2) -> str:
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def between(e: Estimate, digits: int = 2) -> str:
    """A figure and its interval."""
    if np.isnan(e.value):
        return "-"
    return f"{e.value:.{digits}f} [{e.low:.{digits}f}, {e.high:.{digits}f}]"


def widths(drafts: Sequence[str], sets: Sequence[str]) -> tuple[int, int]:
    """Of the first columns of the terminal's table, with names like these."""
    return max(map(len, ("draft", *drafts))), max(map(len, ("prompts", *sets)))


def header(draft: int, dataset: int, size: int) -> str:
    """Titles of the terminal's table, over columns of these widths and `size` positions."""
    positions = "".join(f"{k:7}" for k in range(1, size + 1))
    return (
        f"{'draft':{draft}}{'K':>4}  {'prompts':{dataset}}{'length':>8}{'95 %':>15}{'rounds':>9}"
        f"{positions}"
    )


def row(m: Measurement, draft: int, dataset: int) -> str:
    """A line of it."""
    length = m.accepted_length
    ends = "-" if np.isnan(length.low) else f"{length.low:.3f}..{length.high:.3f}"
    chances = "".join(f"{figure_text(p, 3):>7}" for p in m.conditional_acceptance.value)
    return (
        f"{m.draft:{draft}}{m.block_size:4}  {m.dataset:{dataset}}"
        f"{figure_text(length.value, 3):>8}{ends:>15}{m.rounds:9,}{chances}"
    )


def domain_lines(domains: Iterable[DomainLength]) -> list[str]:
    """Means per domain, for a terminal."""
    return [
        f"{d.domain}: {d.draft} (K={d.block_size}) {between(d.accepted_length, 3)},"
        f" {between(d.to_first, 3)} times the first"
        for d in domains
    ]


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Of Markdown; the first column to the left, the others to the right."""
    rule = [":--", *["--:"] * (len(titles) - 1)]
    lines = [titles, rule, *rows]
    # A | would be a column of its own.
    cells = [" | ".join(x.replace("|", "\\|") for x in line) for line in lines]
    return "\n".join(f"| {line} |" for line in cells)


def picture(name: str, alt: str) -> str:
    """The PNG that goes with the reader's page."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{name}-dark.png">'
        f'<img src="{name}.png" alt="{html.escape(alt)}"></picture>'
    )


def markdown(found: Findings, about: Circumstances) -> str:
    """The whole report; its pictures lie beside it."""
    command, *lines = about.lines
    parts = [
        "# Evaluation",
        f"```sh\n{command}\n```",
        "\n".join(f"- {line}" for line in lines),
        f"Brackets are 95 % intervals over prompts, which were drawn again {RESAMPLES:,} times. The"
        " accepted length is the tokens that a round adds, the target's own included, over the"
        " rounds that no stop token or limit cut. Every draft was verified where it is not said"
        " otherwise.",
        "## Accepted length",
        picture("accepted_length", "Accepted length by set of prompts, with intervals"),
        _lengths(found),
        "Means per domain, and what they are as a multiple of the first drafter's on the same"
        " prompts (intervals of the paired quotient):",
        _domains(found),
        "## Acceptance by position",
        "The chance of a draft to be accepted when all before it were.",
        picture("positions", "Conditional acceptance by position, a panel a domain"),
        _positions(found),
    ]
    if depths(found):
        parts += [
            "## Draft layers",
            picture("depth", "Accepted length against draft layers, a panel a domain"),
        ]
    if found.sizes_differ:
        parts += [
            "## Block length",
            "Drafters that draft fewer tokens a round than they were trained for, each decoded so.",
            picture("block_length", "Accepted length against drafts a round, a panel a domain"),
        ]
    if found.sweeps:
        parts += [
            "## Confidence threshold",
            "Lines: the longest prefix of each block whose confidences all reach the threshold, of"
            " blocks that were drafted while everything was verified. For these blocks the figures"
            " are exact. A run with a threshold drafts other blocks, since it moves on by fewer"
            " tokens where it cuts one short; what such runs did is marked by crosses.",
            picture("thresholds", "Drafts verified and accepted against the threshold"),
            _thresholds(found),
        ]
    if found.reliabilities:
        parts += [
            "## Reliability",
            "Survival: the chance that all drafts up to one are accepted. Bins of fewer than"
            f" {FEW} rounds are not shown; ECE is the expected calibration error of all.",
        ]
        for each in found.reliabilities:
            alt = f"Predicted against observed survival of {each.draft}, by position"
            parts += [picture(each.picture, alt), _reliability(each)]
    return "\n\n".join(parts) + "\n"


def _lengths(found: Findings) -> str:
    sets = list(dict.fromkeys((m.domain, m.dataset) for m in found.measurements))
    keys = list(dict.fromkeys((m.draft, m.block_size) for m in found.measurements))
    lengths = {
        (m.draft, m.block_size, m.dataset): between(m.accepted_length) for m in found.measurements
    }
    rows = [
        [name, str(size), *(lengths[name, size, dataset] for _, dataset in sets)]
        for name, size in keys
    ]
    return table(["drafter", "K", *(f"{name} ({domain})" for domain, name in sets)], rows)


def _domains(found: Findings) -> str:
    rows = [
        [d.draft, str(d.block_size), d.domain, between(d.accepted_length), between(d.to_first)]
        for d in found.domains
    ]
    return table(["drafter", "K", "domain", "accepted length", "over the first"], rows)


def _positions(found: Findings) -> str:
    longest = max(d.block_size for d in found.drafters)
    rows = []
    for p in found.positions:
        chances = p.conditional_acceptance
        cells = [between(chances[k]) for k in range(len(chances.value))]
        rows.append([p.draft, p.domain, *cells, *["-"] * (longest - len(cells))])
    return table(["drafter", "domain", *map(str, range(1, longest + 1))], rows)


def _thresholds(found: Findings) -> str:
    rows = []
    for s in found.sweeps:
        for k in range(0, len(s.thresholds), 2):
            cells = [between(s.verified[k]), between(s.accepted[k]), "-"]
            rows.append([s.draft, s.domain, f"{s.thresholds[k]:.2f}", "blocks", *cells])
        for d in found.decoded:
            if (d.draft, d.domain) == (s.draft, s.domain):
                cells = [between(d.verified), between(d.accepted), between(d.accepted_length)]
                rows.append([d.draft, d.domain, f"{d.threshold:.2f}", "decoded", *cells])
    titles = ["drafter", "domain", "threshold", "of", "verified", "accepted", "accepted length"]
    return table(titles, rows)


def _reliability(found: Reliability) -> str:
    rows = []
    for k, raw in enumerate(found.raw.error):
        scaled = "-" if found.scaled is None else f"{100 * found.scaled.error[k]:.2f}"
        rows.append([str(k + 1), between(found.survival[k], 3), f"{100 * raw:.2f}", scaled])
    titles = ["position", "prefixes accepted", "ECE (%)", "ECE after temperature scaling (%)"]
    return table(titles, rows)
