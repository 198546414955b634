"""Sets of prompts: the paper's benchmarks by name, and any file, grouped by domain."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dspark_jax.config import require
from infer import requests
from infer.requests import Line

Name = Literal[
    "gsm8k",
    "math500",
    "aime25",
    "mbpp",
    "humaneval",
    "livecodebench",
    "mt-bench",
    "alpaca",
    "arena-hard-v2",
]
DOMAINS: dict[str, tuple[Name, ...]] = {
    "math": ("gsm8k", "math500", "aime25"),
    "code": ("mbpp", "humaneval", "livecodebench"),
    "chat": ("mt-bench", "alpaca", "arena-hard-v2"),
}
"""Of the paper's Table 1."""
OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A set of prompts, and the domain whose mean it counts to."""

    name: str
    domain: str
    path: Path
    lines: Sequence[Line]


def domain_of(name: str) -> str:
    """A benchmark's, or `OTHER`."""
    return next((domain for domain, names in DOMAINS.items() if name in names), OTHER)


def open_datasets(
    names: Sequence[Name], folder: Path, paths: Sequence[Path], limit: int | None
) -> list[Dataset]:
    """Benchmarks from `folder`, and files of prompts, by domain.

    Args:
      paths: JSONL files; each is named by its own name without its ending.
      limit: how many prompts of each are taken, from the top.
    Raises:
      InputError: a file cannot be read, or two have the same name.
    """
    for name in names:
        path = folder / f"{name}.jsonl"
        require(
            path.is_file(),
            f"{path}: no such file; python scripts/prepare_prompts.py {name} --output {path}"
            " makes it",
        )
    found: dict[str, Dataset] = {}
    for path in [*(folder / f"{name}.jsonl" for name in names), *paths]:
        name = path.stem
        require(name not in found, f"{path}: there is another {name}, expected different names")
        lines = requests.read_lines(path)[:limit]
        found[name] = Dataset(name, domain_of(name), path, lines)
    order = [*DOMAINS, OTHER]
    return sorted(found.values(), key=lambda each: order.index(each.domain))
