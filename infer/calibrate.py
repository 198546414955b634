"""Fits the confidences of a drafter to what really becomes of its drafts.

python -m infer.calibrate --prompts FILE.jsonl --output calibration.json [--plot FILE.png]

Decodes the prompts with every draft verified, once for each temperature, and fits sequential
temperature scaling (paper, section 4.1) to the rounds of every other prompt; the rest are kept to
measure it on. Prints, by position, calibration error, AUROC and Brier score before and after. The
prompts are to be like those that will be decoded, and none that the drafter was trained on.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from dspark_jax import batch_shape, calibration, generation
from dspark_jax.calibration import PrefixMetrics
from dspark_jax.config import InputError, require
from dspark_jax.generation import Pair
from dspark_jax.io import cli, files
from dspark_jax.io.calibration_file import Calibration, Entry
from dspark_jax.request import Completion, Request
from dspark_jax.state import block_size
from infer import pictures, requests, results
from infer.engine import Engine
from infer.models import load_both, require_both

FEW = 1000
"""Rounds below which a fit is mostly noise: 50 a bin of the calibration error."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `infer.calibrate`."""

    prompts: Path
    """JSONL file of prompts, as for `infer.generate`; their own settings are left alone but for
    the sampling, which is this command's."""
    output: Path
    """JSON file for the calibration."""
    target: str | None = None
    """Hugging Face folder or repository id, or GGUF file, of the target; default: the one in the
    package."""
    draft: str | None = None
    """The same of its drafter; default: the one in the package."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Sampling temperatures that are fitted, each on its own; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    """Most tokens to add to a prompt."""
    slots: int = 16
    """Prompts that are decoded together."""
    block_size: int | None = None
    """Drafts a round, at most what the drafter was trained for, which is the default."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters, activations and caches."""
    plot: Path | None = None
    """PNG file for predicted against observed survival, before and after (extra `plots`); one for a
    dark page, FILE-dark.png, is put beside it."""
    seed: int = 0

    def check(self) -> None:
        """Raises `InputError` for what is wrong whatever the models are."""
        require(len(self.temperatures) > 0, "--temperatures: expected at least one")
        require(self.slots >= 1, f"--slots {self.slots}: expected a whole number above 0")
        require_both(self.target, self.draft)
        for temperature in self.temperatures:
            self.request(temperature).check(vocab_size=1, max_position=2)
        require(
            len(set(self.temperatures)) == len(self.temperatures),
            "--temperatures: expected different ones",
        )
        results.check_place(self.output, "--output")
        if self.plot is not None:
            pictures.check(self.plot, "--plot")
        drawn = [] if self.plot is None else pictures.paths(self.plot)
        places = [path.resolve() for path in (self.prompts, self.output, *drawn)]
        require(
            len(set(places)) == len(places),
            "--prompts, --output and --plot: expected different files",
        )

    def request(self, temperature: float) -> Request:
        """A request with these settings, without its prompt."""
        names = ("top_p", "top_k", "min_p", "max_new_tokens", "seed")
        given = {name: getattr(self, name) for name in names}
        return Request(token_ids=(0,), temperature=temperature, **given)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """N rounds in which all K drafts were verified."""

    logits: np.ndarray  # [N, K]
    accepted: np.ndarray  # [N, K] bool: whether drafts 1..k were all accepted

    @staticmethod
    def of(completions: Sequence[Completion], size: int) -> Rounds:
        logits = [block for c in completions for block in c.confidence_logits or ()]
        counts = [count for c in completions for count in c.accepted_drafts]
        accepted = np.array(counts, int)[:, None] > np.arange(size)
        return Rounds(np.array(logits).reshape(-1, size), accepted)


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="infer.calibrate", description=__doc__ or "")
    settings.check()
    return cli.until_interrupted(lambda: run(settings), lambda: "nothing was written")


def run(settings: Settings) -> None:
    """Decodes, fits, prints, and writes once everything is done."""
    lines = requests.read_lines(settings.prompts)
    target, draft, pair = load_both(
        settings.target, settings.draft, settings.dtype, settings.block_size
    )
    cfg = pair.models.drafter_config
    if cfg is None or not cfg.confidence_head:
        raise InputError(f"{draft}: the drafter has no confidence head, there is nothing to fit")
    entries, curves = [], {}
    for temperature in settings.temperatures:
        defaults = settings.request(temperature)
        asked = requests.build_alike(settings.prompts, lines, pair, defaults=defaults)
        fit, kept = _decode(settings, pair, asked)
        entry, before, after = fit_entry(fit, kept, defaults)
        entries.append(entry)
        curves[temperature] = kept, entry
        sizes = f"{len(fit.logits):,} rounds fitted, {len(kept.logits):,} kept"
        print(f"temperature {temperature:g}: {sizes}")
        print(table(entry, before, after))
        if set(entry.temperatures) == {1.0}:
            print("no temperature gains more than the noise of these rounds: all stay 1")
        if len(fit.logits) < FEW:
            said = f"only {len(fit.logits)} rounds at temperature {temperature:g}"
            print(f"{said}: too few to trust, {FEW:,} and more are better", file=sys.stderr)
    made = Calibration(
        target=files.fingerprint(target),
        draft=files.fingerprint(draft),
        block_size=cfg.block_size,
        entries=tuple(entries),
    )
    made.save(settings.output)
    fitted = ", ".join(f"{t:g}" for t in settings.temperatures)
    print(f"{settings.output}: blocks of {cfg.block_size} at temperature {fitted}")
    if settings.plot is not None:
        pictures.save(settings.plot, lambda figure: plot(figure, curves))
        print(*pictures.paths(settings.plot), sep="\n")


def _decode(settings: Settings, pair: Pair, asked: Sequence[Request]) -> tuple[Rounds, Rounds]:
    """Rounds of every other prompt to fit, and those of the rest."""
    cfg = generation.decode_config(pair.models, asked, policy="fixed", trace=True)
    shape = batch_shape.plan(pair.models, asked, min(settings.slots, len(asked)))
    with tqdm(total=len(asked), unit="prompt", disable=None) as bar:
        run = Engine(pair, shape, cfg).decode(asked, lambda done: bar.update(len(done)) and False)
    size = block_size(pair.models, cfg)
    fit, kept = (Rounds.of(run.completions[i::2], size) for i in (0, 1))
    require(
        len(fit.logits) > 0 and len(kept.logits) > 0,
        f"{settings.prompts}: too few rounds to fit and to measure: expected more prompts",
    )
    return fit, kept


def fit_entry(
    fit: Rounds, kept: Rounds, request: Request
) -> tuple[Entry, PrefixMetrics, PrefixMetrics]:
    """Temperatures fitted to some rounds, and the metrics of others before and after."""
    temperatures = calibration.fit_sts(fit.logits, fit.accepted)
    before = calibration.prefix_metrics(kept.logits, kept.accepted)
    after = calibration.prefix_metrics(kept.logits, kept.accepted, temperatures=temperatures)
    entry = Entry(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        temperatures=tuple(temperatures.tolist()),
        ece_before=tuple(before.ece.tolist()),
        ece_after=tuple(after.ece.tolist()),
        rounds=len(fit.logits),
    )
    return entry, before, after


def table(entry: Entry, before: PrefixMetrics, after: PrefixMetrics) -> str:
    """Metrics of the kept rounds, by position and in the mean over positions."""
    columns = ("ece", "auroc", "brier")
    lines = [f"{'position':>8}{'T':>8}" + "".join(f"{name:>10}{'after':>10}" for name in columns)]
    pairs = [(getattr(before, name), getattr(after, name)) for name in columns]
    for k, temperature in enumerate(entry.temperatures):
        values = "".join(f"{a[k]:10.4f}{b[k]:10.4f}" for a, b in pairs)
        lines.append(f"{k + 1:8}{temperature:8.3f}{values}")
    values = "".join(f"{np.nanmean(a):10.4f}{np.nanmean(b):10.4f}" for a, b in pairs)
    return "\n".join([*lines, f"{'mean':>8}{'':8}{values}"])


def plot(figure: Any, curves: Mapping[float, tuple[Rounds, Entry]]) -> None:
    """Reliability of the survival at every position: a row a temperature, before and after."""
    figure.set_size_inches(9, 4.2 * len(curves) + 0.5)
    axes = figure.subplots(len(curves), 2, squeeze=False)
    for row, (temperature, (rounds, entry)) in zip(axes, curves.items(), strict=True):
        fitted: Any = np.array(entry.temperatures)
        for axis, name, divisors in zip(row, ("raw", "scaled"), (None, fitted), strict=True):
            chances = calibration.survival(rounds.logits, divisors)
            axis.plot([0, 1], [0, 1], color="0.6", linewidth=1, marker="")
            for k in range(chances.shape[1]):
                accepted = rounds.accepted[:, k]
                bins = calibration.reliability(chances[:, k], accepted, pictures.CURVE_BINS)
                seen = bins.count >= pictures.FEW
                axis.plot(bins.predicted[seen], bins.observed[seen], label=f"position {k + 1}")
            axis.set(
                title=f"{name}, temperature {temperature:g}",
                xlabel="predicted survival",
                ylabel="prefixes accepted",
                xlim=pictures.EDGES,
                ylim=pictures.EDGES,
            )
    pictures.below(figure, axes[0][0])


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
