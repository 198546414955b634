"""A cost table on disk, and what it was measured on."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from dspark_jax.config import InputError, require
from dspark_jax.costs import CostTable
from dspark_jax.io import files
from dspark_jax.plans import Plan


@dataclasses.dataclass(frozen=True)
class CostFile:
    """A table, and the setting that it holds for."""

    target: str
    """Fingerprint of the target; see `files.fingerprint`."""
    draft: str
    block_size: int
    slots: int
    device: str
    dtype: str
    greedy: bool
    """Whether tokens were taken by argmax alone."""
    context: int
    """Tokens that each row held."""
    date: str
    table: CostTable

    def check_fits(self, where: Path, **now: Any) -> None:
        """Raises `InputError` when the field of any of these names has another value."""
        for name, value in now.items():
            measured = getattr(self, name)
            short = "another" if name in ("target", "draft") else f"{name}={measured},"
            require(
                measured == value,
                f"{where}: the costs were measured for {short}"
                f" {name if short == 'another' else f'not {value}'}: profile again",
            )

    def save(self, path: Path) -> None:
        """Writes JSON, whole or not at all."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["table"] = [
            {"drafts": plan.drafts, "capacity": plan.capacity, "seconds": seconds}
            for plan, seconds in sorted(self.table.seconds.items())
        ]
        files.write_whole(path, json.dumps(values, indent=2) + "\n")


def load(path: Path) -> CostFile:
    """Reads what `CostFile.save` wrote; anything else is an `InputError`."""
    values = files.read_json(path)
    try:
        seconds: dict[Plan, float] = {}
        for entry in values["table"]:
            plan = Plan(*(files.typed(entry[name], int) for name in ("drafts", "capacity")))
            if plan in seconds:
                raise ValueError(f"{plan.drafts} drafts in {plan.capacity} tokens are there twice")
            seconds[plan] = files.typed(entry["seconds"], float)
        if not seconds or not all(0 < s < math.inf for s in seconds.values()):
            raise ValueError("expected seconds above 0")
        names = {f.name: str for f in dataclasses.fields(CostFile)} | dict.fromkeys(
            ("block_size", "slots", "context"), int
        )
        names["greedy"] = bool
        del names["table"]
        fields = {name: files.typed(values[name], kind) for name, kind in names.items()}
        return CostFile(**fields, table=CostTable(fields["slots"], seconds))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: not a cost table ({files.fault(error)})") from error
