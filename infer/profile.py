"""Measures what a round costs, for the policies causal and delayed.

python -m infer.profile --output costs.json [--slots 8]

Times whole rounds (draft, schedule, verify, commit) of every kind that decoding may run, with all
slots occupied: so many drafts a row, so much room in the target's pass. The table holds for this
pair, block size, number of slots, dtype and device, and infer.generate takes it by --cost-table.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Literal

from dspark_jax import costs, generation
from dspark_jax.batch_shape import BatchShape
from dspark_jax.config import InputError, require
from dspark_jax.io import cli, files
from dspark_jax.io.cost_file import CostFile
from dspark_jax.request import Request
from dspark_jax.state import block_size, cache_length, plans_of
from infer import facts, results
from infer.models import devices_of, load_both, require_both


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `infer.profile`."""

    output: Path
    """JSON file for the table."""
    target: str | None = None
    """Hugging Face folder or repository id, or GGUF file, of the target; default: the one in the
    package."""
    draft: str | None = None
    """The same of its drafter; default: the one in the package."""
    slots: int = 8
    """Rows that are decoded together."""
    context: int = 256
    """Tokens that each row holds."""
    temperature: float = 1.0
    """0 measures greedy decoding, anything else sampling."""
    block_size: int | None = None
    """Most drafts a round, at most what the drafter was trained for, which is the default."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters, activations and caches."""
    tensor_parallel: int = 1
    """Devices that the models are split over."""
    repeats: int = 7
    """Timed calls for each kind of round, of which the median counts."""

    def check(self) -> None:
        """Raises `InputError` for what is wrong whatever the models are."""
        require_both(self.target, self.draft)
        for name in ("slots", "context", "repeats"):
            value = getattr(self, name)
            require(value >= 1, f"--{name} {value}: expected a whole number above 0")
        Request((0,), temperature=self.temperature).check(vocab_size=1, max_position=2)
        results.check_place(self.output, "--output")


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="infer.profile", description=__doc__ or "")
    settings.check()
    return cli.until_interrupted(lambda: run(settings), lambda: "nothing was written")


def run(settings: Settings) -> None:
    """Measures, prints and writes."""
    target, draft, pair = load_both(
        settings.target,
        settings.draft,
        settings.dtype,
        settings.block_size,
        settings.tensor_parallel,
    )
    request = Request((0,), temperature=settings.temperature)
    cfg = generation.decode_config(pair.models, [request], policy="delayed")
    size = block_size(pair.models, cfg)
    length = cache_length(settings.context, 32 * (1 + size), size)
    most = pair.models.target_config.max_position
    if length > most:
        raise InputError(
            f"--context {settings.context}: with the rounds behind it {length} positions, the"
            f" target holds {most}"
        )
    facts.require_memory(
        pair.models, BatchShape(settings.slots, length, 16), "--context", lazy=True
    )
    table = costs.measure(
        pair.models,
        cfg,
        plans_of(pair.models, cfg, settings.slots),
        rows=settings.slots,
        length=length,
        context=settings.context,
        repeats=settings.repeats,
        progress=facts.progress,
    )
    made = CostFile(
        target=files.fingerprint(target),
        draft=files.fingerprint(draft),
        block_size=size,
        slots=settings.slots,
        device=devices_of(pair.models),
        dtype=settings.dtype,
        greedy=cfg.greedy,
        context=settings.context,
        date=date.today().isoformat(),
        table=table,
    )
    print("\n".join(costs.describe(table)))
    made.save(settings.output)
    print(f"{settings.output}: {len(table.seconds)} kinds of rounds of {settings.slots} slots")


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
