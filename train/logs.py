"""What a run reports: JSONL files, TensorBoard events, and a progress bar on a terminal.

Weights & Biases too where a project is named; it is imported only then.
"""

from __future__ import annotations

import importlib
import json
import math
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tensorboardX import SummaryWriter
from tqdm import tqdm

from dspark_jax.config import InputError, require
from dspark_jax.io import files
from train.settings import Settings

Kind = Literal["metrics", "evaluation"]
KINDS: tuple[Kind, ...] = ("metrics", "evaluation")


class Logs:
    """Writes under the workdir; what an interrupted run wrote past `step` is dropped.

    Each kind of record has a file, KIND.jsonl.
    """

    def __init__(self, settings: Settings, *, step: int):
        self._folder = folder = settings.workdir
        for path in (folder / f"{kind}.jsonl" for kind in KINDS):
            if path.exists():
                files.write_whole(path, "".join(line for n, line in _lines(path) if n <= step))
        purge = step + 1 if step else None
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self._wandb = _start_wandb(settings) if settings.watch.wandb else None
        self._bar = tqdm(
            total=settings.optimizer.steps,
            initial=step,
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
        )

    def write(self, kind: Kind, step: int, values: Mapping[str, float]) -> None:
        """One record, of the state after `step` steps; what is not finite becomes null."""
        known = {n: v if math.isfinite(v) else None for n, v in values.items()}
        with (self._folder / f"{kind}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **known}) + "\n")
        prefix = "" if kind == "metrics" else f"{kind}/"
        named = {prefix + n: v for n, v in values.items() if math.isfinite(v)}
        for name, value in named.items():
            self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **named})
        shown = {n: named[n] for n in ("loss", "expected_accepted_length") if n in named}
        if shown:
            self._bar.set_postfix({n: f"{v:.3f}" for n, v in shown.items()}, refresh=False)

    def advance(self) -> None:
        """One more step on the progress bar."""
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


class NoLogs(Logs):
    """Of hosts that write nothing."""

    def __init__(self):
        pass

    def write(self, kind: Kind, step: int, values: Mapping[str, float]) -> None:
        pass

    def advance(self) -> None:
        pass

    def close(self) -> None:
        pass


def check_logs(folder: Path) -> None:
    """Raises `InputError` when a file in the workdir is none of `Logs`, with the line."""
    for path in (folder / f"{kind}.jsonl" for kind in KINDS):
        if path.exists():
            _lines(path)


def _lines(path: Path) -> list[tuple[int, str]]:
    """Steps and whole lines; the last line may have been torn by a kill."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason})") from error
    found = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        where = f"{path}: line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not valid JSON ({error})") from error
        require(
            isinstance(record, dict) and isinstance(record.get("step"), int),
            f"{where}: expected a JSON object with a whole number `step`",
        )
        found.append((record["step"], line))
    return found


def check_wandb(settings: Settings) -> None:
    """Raises `InputError` when a project is named and the package is missing."""
    if settings.watch.wandb:
        _wandb()


def _wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise InputError("wandb: not installed; expected dspark_jax[wandb]") from error


def _start_wandb(settings: Settings) -> Any:
    """The run of this workdir, begun or gone on with."""
    path = settings.workdir / "wandb-id"
    if not path.exists():
        files.write_whole(path, secrets.token_hex(8))
    run = _wandb().init(
        project=settings.watch.wandb,
        id=path.read_text(),
        resume="allow",
        dir=settings.workdir,
        config=settings.flat(),
    )
    # Its own count of steps only rises, and a resumed run may go back to a checkpoint.
    run.define_metric("*", step_metric="step")
    return run
