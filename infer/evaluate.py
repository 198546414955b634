"""Measures how many of a drafter's tokens a target accepts, and what its confidences are worth.

python -m infer.evaluate --datasets gsm8k mbpp mt-bench --output DIR [--prompts FILE.jsonl ..]
                         [--target TARGET --draft DRAFTER [DRAFTER ..]]

Decodes every set of prompts with every drafter, all drafts verified, and prints for each the
accepted length (tokens a round, the target's own included), its 95 % interval over prompts, and the
chance of each draft to be accepted after those before it. The prompts are to be none that the
drafters were trained on. DIR gets evaluate.json, report.md and its pictures: the paper's Table 1
and figures 2 to 6, as far as drafters and block sizes are given to compare.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal

import jax

from dspark_jax.config import require
from dspark_jax.generation import EMBEDDED, Pair
from dspark_jax.io import cli, files
from dspark_jax.io.tokenizer import load_tokenizer
from dspark_jax.request import Request
from infer import pictures, requests, results
from infer.evaluation import datasets, figures, findings, measure, page, report
from infer.evaluation.datasets import Dataset, Name
from infer.evaluation.findings import Findings, Measurement
from infer.evaluation.measure import NO_CALIBRATION, Asked
from infer.evaluation.page import Text
from infer.evaluation.report import Circumstances
from infer.evaluation.sample import Drafter, Sample, largest
from infer.models import load_both

FILE = "evaluate.json"
REPORT = "report.md"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `infer.evaluate`."""

    output: Path
    """Folder for evaluate.json, report.md and its pictures; it is made if need be."""
    datasets: tuple[Name, ...] = ()
    """Benchmarks, NAME.jsonl of the dataset folder, which scripts/prepare_prompts.py makes."""
    dataset_folder: Path = Path("eval_datasets")
    """Where they are."""
    prompts: tuple[Path, ...] = ()
    """Other JSONL files of prompts, as for `infer.generate`; of a line's own settings only
    max_new_tokens is heeded."""
    limit: int | None = None
    """Most prompts of a set, from its top."""
    target: str | None = None
    """Hugging Face folder or repository id, or GGUF file, of the target; default: the one in the
    package."""
    draft: tuple[str, ...] = ()
    """The same of its drafters; default: the one in the package."""
    block_sizes: tuple[int, ...] = ()
    """Drafts a round, each with the drafters that were trained for as many; default: what each was
    trained for."""
    thresholds: tuple[float, ...] = ()
    """Confidence thresholds, in 0..1, that are decoded with too, beside the sweep over the blocks
    that were verified whole."""
    calibration: tuple[str, ...] = ()
    """What infer.calibrate wrote, a file for each drafter in their order, or none."""
    html: Path | None = None
    """HTML file that shows every round of some texts: what was accepted, rejected, corrected and,
    with --thresholds, never verified."""
    html_texts: int = 2
    """Texts of each set of prompts that it shows."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    """Most tokens to add to a prompt."""
    slots: int = 16
    """Prompts that are decoded together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters, activations and caches."""
    tensor_parallel: int = 1
    """Devices that the models and the caches are split over."""
    thinking: bool = False
    """Let answers to chats start with thinking, where the chat template knows that."""
    seed: int = 0

    @property
    def request(self) -> Request:
        """A request with these settings, without its prompt."""
        return Request(token_ids=(0,), **{name: getattr(self, name) for name in SAMPLING})

    def check(self) -> None:
        """Raises `InputError` for what is wrong whatever the models are."""
        for option in ("datasets", "prompts", "draft", "block_sizes", "thresholds"):
            given = getattr(self, option)
            name = option.replace("_", "-")
            require(len(set(given)) == len(given), f"--{name}: expected different ones")
        require(
            len(self.datasets) + len(self.prompts) > 0,
            "--datasets and --prompts: expected at least one set of prompts",
        )
        require(
            self.target is None or len(self.draft) > 0,
            "--target without --draft: expected its drafters",
        )
        for name, value in (
            ("slots", self.slots),
            ("limit", self.limit),
            ("html-texts", self.html_texts),
        ):
            require(
                value is None or value >= 1, f"--{name} {value}: expected a whole number above 0"
            )
        for threshold in self.thresholds:
            require(0 <= threshold <= 1, f"--thresholds {threshold}: expected numbers in 0..1")
        drafters = max(1, len(self.draft))
        require(
            len(self.calibration) in (0, drafters),
            f"--calibration: expected a file, or {NO_CALIBRATION}, for each of {drafters} drafters",
        )
        self.request.check(vocab_size=1, max_position=2)
        require(
            self.output.is_dir() or not self.output.exists(),
            f"--output {self.output}: is a file, expected a folder",
        )
        require(
            self.output.parent.is_dir(),
            f"--output {self.output}: no such folder as {self.output.parent}",
        )
        if self.html is not None and self.html.parent != self.output:
            results.check_place(self.html, "--html")
        pictures.require_matplotlib()


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="infer.evaluate", description=__doc__ or "")
    settings.check()
    command = shlex.join(["python", "-m", "infer.evaluate", *args])
    return cli.until_interrupted(
        lambda: run(settings, command), lambda: "what was not measured to its end is lost"
    )


def run(settings: Settings, command: str) -> None:
    """Measures, prints, and writes: the figures after each set of prompts, the rest at the end."""
    sets = datasets.open_datasets(
        settings.datasets, settings.dataset_folder, settings.prompts, settings.limit
    )
    target = files.resolve(settings.target or EMBEDDED / "target")
    drafters = measure.open_drafters(
        target,
        settings.draft or (str(EMBEDDED / "drafter"),),
        settings.block_sizes,
        settings.calibration,
        settings.temperature,
    )
    heads = any(drafter.confidence_head for drafter in drafters)
    require(heads or not settings.thresholds, "--thresholds: no drafter has a confidence head")
    about = circumstances(settings, command, drafters)
    widths = report.widths([d.name for d in drafters], [s.name for s in sets])
    whole: list[Sample] = []
    cut: list[Sample] = []
    texts: list[Text] = []
    measured: list[Measurement] = []
    for drafter, sizes in drafters.items():
        _, _, pair = load_both(
            settings.target, drafter.path, settings.dtype, None, settings.tensor_parallel
        )
        asked = {each.name: build(settings, each, pair) for each in sets}
        if not whole:
            print(report.header(*widths, max(d.block_size for d in drafters)))
        work = functools.partial(measure.decode, pair, drafter, sets, asked, slots=settings.slots)
        for size in sizes:
            for found in work(size=size):
                whole.append(found)
                measured.append(findings.measurement(found))
                print(report.row(measured[-1], *widths), flush=True)
                write_figures(settings, about, {"measurements": findings.plain(measured)})
        for threshold in settings.thresholds if drafter.confidence_head else ():
            cut += work(size=drafter.block_size, threshold=threshold)
        shown = [s for s in (*whole, *cut) if s.drafter == drafter]
        texts += texts_of(shown, asked, pair, settings.html_texts)
    found = findings.find(whole, cut)
    print("\n".join(report.domain_lines(found.domains)))
    write_figures(settings, about, findings.plain(found))
    write_report(settings, about, found)
    if settings.html is not None:
        decode = functools.partial(load_tokenizer(target).decode, special=True)
        files.write_whole(settings.html, page.render(texts, about.lines, decode))
        print(settings.html)


def build(settings: Settings, each: Dataset, pair: Pair) -> list[Request]:
    """The requests of a set of prompts."""
    return requests.build_alike(
        each.path, each.lines, pair, defaults=settings.request, thinking=settings.thinking
    )


def circumstances(settings: Settings, command: str, drafters: Iterable[Drafter]) -> Circumstances:
    """How it is measured."""
    device = jax.devices()[0].device_kind
    if settings.tensor_parallel > 1:
        device = f"{settings.tensor_parallel} x {device}"
    return Circumstances(
        command=command,
        target=settings.target or "the one in the package",
        dtype=settings.dtype,
        sampling={name: getattr(settings, name) for name in SAMPLING},
        thinking=settings.thinking,
        device=f"{device} ({platform.machine()}, {os.cpu_count()} cores)",
        jax=jax.__version__,
        date=date.today().isoformat(),
        sources={d.name: d.path for d in drafters},
    )


def texts_of(samples: Sequence[Sample], asked: Asked, pair: Pair, most: int) -> list[Text]:
    """The first texts of each set of prompts, at the largest block size of the drafter."""
    found = []
    for each in largest(samples):
        own = zip(each.dataset.lines, asked[each.dataset.name], each.completions, strict=True)
        policy = "all verified" if each.threshold is None else f"threshold {each.threshold:g}"
        for line, request, completion in itertools.islice(own, most):
            title = f"{each.dataset.name} {line.id}: {each.drafter.name}, {policy}"
            prompt = pair.tokenizer.decode(request.token_ids, special=True)
            found.append(Text(title, prompt, completion))
    return found


def write_figures(settings: Settings, about: Circumstances, found: dict[str, Any]) -> None:
    settings.output.mkdir(exist_ok=True)
    text = json.dumps(findings.plain(about) | found, indent=2) + "\n"
    files.write_whole(settings.output / FILE, text)


def write_report(settings: Settings, about: Circumstances, found: Findings) -> None:
    """The report and its pictures."""
    for name, draw in figures.drawings(found):
        pictures.save(settings.output / f"{name}.png", draw)
    files.write_whole(settings.output / REPORT, report.markdown(found, about))
    print(f"{settings.output}: {', '.join(sorted(p.name for p in settings.output.iterdir()))}")


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
