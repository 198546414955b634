"""What an evaluation found: the numbers of the paper's Table 1 and of its figures 2 to 6.

Letters: N prompts, B replicates (see `estimates`), K drafts a round, T thresholds, J bins.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.calibration import ECE_BINS
from infer.evaluation import counts
from infer.evaluation.estimates import Estimate, quotient, resample
from infer.evaluation.sample import Drafter, Sample, by, largest
from infer.pictures import CURVE_BINS

THRESHOLDS = np.linspace(0, 1, 21)
"""Of the sweep."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A drafter on a set of prompts."""

    draft: str
    block_size: int
    dataset: str
    domain: str
    requests: int
    rounds: int
    accepted_length: Estimate
    conditional_acceptance: Estimate
    """[K] by position: accepted, of those judged behind accepted ones alone."""


@dataclasses.dataclass(frozen=True)
class DomainLength:
    """Mean over a domain's sets of their accepted lengths (Table 1, figures 3 and 4)."""

    draft: str
    block_size: int
    domain: str
    accepted_length: Estimate
    to_first: Estimate
    """Over that of the first drafter on the same prompts, each at its largest block size."""


@dataclasses.dataclass(frozen=True)
class Positions:
    """Conditional acceptance over all rounds of a domain (figure 2)."""

    draft: str
    domain: str
    conditional_acceptance: Estimate
    """[K]"""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a confidence threshold verifies of the blocks of a domain (figure 5).

    The blocks are those of runs with every draft verified; see `counts.by_threshold`.
    """

    draft: str
    domain: str
    thresholds: np.ndarray
    """[T]"""
    verified: Estimate
    """[T] drafts verified, of those made."""
    accepted: Estimate
    """[T] drafts accepted, of those verified."""


@dataclasses.dataclass(frozen=True)
class Decoded:
    """The same of a run that was decoded with the threshold."""

    draft: str
    domain: str
    threshold: float
    verified: Estimate
    accepted: Estimate
    accepted_length: Estimate


@dataclasses.dataclass(frozen=True)
class Curve:
    """Predicted survival and what became of it, by position and bins: [K, J]."""

    count: np.ndarray
    """Rounds."""
    predicted: np.ndarray
    observed: Estimate
    error: np.ndarray
    """[K] expected calibration error, over `ECE_BINS` bins."""


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Of the survival at each position, over all prompts (figure 6)."""

    draft: str
    rounds: int
    survival: Estimate
    """[K] prefixes accepted."""
    raw: Curve
    scaled: Curve | None
    """After sequential temperature scaling."""

    @property
    def picture(self) -> str:
        """Name of its picture's file, without the ending."""
        return "reliability_" + re.sub(r"[^\w.]+", "-", self.draft)


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that an evaluation found."""

    drafters: Sequence[Drafter]
    measurements: Sequence[Measurement]
    domains: Sequence[DomainLength]
    positions: Sequence[Positions]
    sweeps: Sequence[Sweep]
    decoded: Sequence[Decoded]
    reliabilities: Sequence[Reliability]

    @property
    def sizes_differ(self) -> bool:
        """Whether a drafter was measured at several block sizes."""
        return len({(m.draft, m.block_size) for m in self.measurements}) > len(self.drafters)

    def of(self, drafter: Drafter) -> list[Measurement]:
        """Measurements at its largest block size."""
        key = (drafter.name, drafter.block_size)
        return [m for m in self.measurements if (m.draft, m.block_size) == key]

    def length(self, drafter: Drafter, domain: str) -> DomainLength:
        """The mean in a domain at its largest block size."""
        key = (drafter.name, drafter.block_size, domain)
        (found,) = [d for d in self.domains if (d.draft, d.block_size, d.domain) == key]
        return found


def find(whole: Sequence[Sample], cut: Sequence[Sample]) -> Findings:
    """All figures of samples whose drafts were all verified, and of those cut at thresholds."""
    main = largest(whole)
    return Findings(
        drafters=list(dict.fromkeys(s.drafter for s in whole)),
        measurements=[measurement(s) for s in whole],
        domains=domain_lengths(whole),
        positions=positions(main),
        sweeps=sweeps(main),
        decoded=decoded(cut),
        reliabilities=reliabilities(main),
    )


def depths(found: Findings) -> list[list[Drafter]]:
    """Groups of drafters that are alike but for their layers; none if no two differ in these."""
    alike = lambda d: (type(d.config), dataclasses.replace(d.config, num_layers=1))  # noqa: E731
    groups = [
        sorted(own, key=lambda d: d.config.num_layers) for _, own in by(found.drafters, alike)
    ]
    deep = any(len({d.config.num_layers for d in own}) > 1 for own in groups)
    return groups if deep else []


def measurement(sample: Sample) -> Measurement:
    passed, tried = np.moveaxis(
        resample(counts.positions(sample.completions, sample.block_size), sample.often), 1, 0
    )
    return Measurement(
        draft=sample.drafter.name,
        block_size=sample.block_size,
        dataset=sample.dataset.name,
        domain=sample.dataset.domain,
        requests=len(sample.completions),
        rounds=sample.rounds,
        accepted_length=Estimate.of(sample.accepted_length),
        conditional_acceptance=Estimate.of(quotient(passed, tried)),
    )


def domain_lengths(samples: Sequence[Sample]) -> list[DomainLength]:
    """Of all drafters and block sizes, in all domains; `samples` verified every draft."""
    found, first = [], samples[0].drafter
    for domain, own in by(samples, lambda s: s.dataset.domain):
        base = [s for s in own if (s.drafter, s.block_size) == (first, first.block_size)]
        for (draft, size), each in by(own, lambda s: (s.drafter.name, s.block_size)):
            lengths = _mean_length(each)
            ratio = quotient(lengths, _mean_length(base))
            found.append(
                DomainLength(draft, size, domain, Estimate.of(lengths), Estimate.of(ratio))
            )
    return found


def _mean_length(samples: Sequence[Sample]) -> np.ndarray:
    return np.mean([s.accepted_length for s in samples], axis=0)


def positions(samples: Sequence[Sample]) -> list[Positions]:
    """Of each drafter in each domain."""
    found = []
    for (domain, draft), own in by(samples, lambda s: (s.dataset.domain, s.drafter.name)):
        size = own[0].block_size
        passed, tried = _pooled(own, lambda s, k=size: counts.positions(s.completions, k))
        found.append(Positions(draft, domain, Estimate.of(quotient(passed, tried))))
    return found


def sweeps(samples: Sequence[Sample]) -> list[Sweep]:
    """Of each drafter with a confidence head in each domain."""
    found = []
    own = [s for s in samples if s.drafter.confidence_head]
    for (domain, draft), each in by(own, lambda s: (s.dataset.domain, s.drafter.name)):
        accepted, verified, made = _pooled(
            each, lambda s: counts.by_threshold(s.completions, THRESHOLDS)
        )
        found.append(
            Sweep(
                draft,
                domain,
                THRESHOLDS,
                verified=Estimate.of(quotient(verified, made)),
                accepted=Estimate.of(quotient(accepted, verified)),
            )
        )
    return found


def decoded(samples: Sequence[Sample]) -> list[Decoded]:
    """Of runs that were decoded with thresholds."""
    found = []
    key = lambda s: (s.dataset.domain, s.drafter.name, s.threshold)  # noqa: E731
    for (domain, draft, threshold), own in by(samples, key):
        accepted, verified, made = _pooled(
            own, lambda s: counts.verified(s.completions, s.block_size)
        )
        found.append(
            Decoded(
                draft,
                domain,
                threshold,
                verified=Estimate.of(quotient(verified, made)),
                accepted=Estimate.of(quotient(accepted, verified)),
                accepted_length=Estimate.of(_mean_length(own)),
            )
        )
    return found


def reliabilities(samples: Sequence[Sample]) -> list[Reliability]:
    """Of each drafter with a confidence head."""
    found = []
    for drafter, own in by(samples, lambda s: s.drafter):
        if not drafter.confidence_head:
            continue
        raw, accepted, rounds = _curve(own, None)
        scaled = None
        if drafter.temperatures is not None:
            scaled, _, _ = _curve(own, np.array(drafter.temperatures))
        survived = Estimate.of(quotient(accepted, rounds))
        found.append(Reliability(drafter.name, int(rounds[0, 0]), survived, raw, scaled))
    return found


def _curve(
    samples: Sequence[Sample], temperatures: np.ndarray | None
) -> tuple[Curve, np.ndarray, np.ndarray]:
    """The curve, and [B, K] prefixes that were accepted and all of them."""
    accepted, predicted, count = _pooled(
        samples, lambda s: counts.reliability(s.completions, s.block_size, temperatures)
    )  # [B, K, J]
    gaps = abs(predicted[0] - accepted[0]).sum(axis=-1)
    error = quotient(gaps, count[0].sum(axis=-1))
    totals = accepted.sum(axis=-1), count.sum(axis=-1)
    shape = (*accepted.shape[:-1], CURVE_BINS, ECE_BINS // CURVE_BINS)
    accepted, predicted, count = (
        x.reshape(shape).sum(axis=-1) for x in (accepted, predicted, count)
    )
    observed = Estimate.of(quotient(accepted, count))
    return Curve(count[0], quotient(predicted[0], count[0]), observed, error), *totals


def _pooled(samples: Sequence[Sample], sums: Any) -> np.ndarray:
    """[.., B, ..] totals over all prompts of the samples of sums [N, .., ..] of each."""
    totals = [resample(sums(s), s.often) for s in samples]
    return np.moveaxis(np.sum(totals, axis=0), 1, 0)


def plain(value: Any) -> Any:
    """Figures as JSON: NaN is null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    return None if isinstance(value, float) and value != value else value
